"""The Job of an attempt: exactly one pod, no retries, and it ends only when that pod has ended."""

from __future__ import annotations

from collections.abc import Sequence

from orbit_operator.facts import RUN_CONTAINER
from orbit_operator.manifests.pod import build_pod_template
from orbit_operator.manifests.source import Object, RunSource, job_name, metadata
from orbit_operator.settings import Settings

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"

FAILURE_RULES: list[Object] = [
    {"action": "FailJob", "onExitCodes": {"containerName": RUN_CONTAINER, "operator": "NotIn", "values": [0]}},
    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
]
"""Every failure ends the Job, as it would without these rules; with them, the Job's condition keeps the exit code."""


def build_job(source: RunSource, attempt: int, avoid_nodes: Sequence[str], settings: Settings) -> Object:
    """Created once and never changed: a queue decides on `suspend`."""
    head = metadata(source, job_name(source.name, attempt), attempt)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": head,
        "spec": {
            "backoffLimit": 0,
            "completions": 1,
            "parallelism": 1,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": FAILURE_RULES},
            "suspend": put_into_queue(head, source, settings),
            "template": build_pod_template(source, attempt, avoid_nodes, settings),
        },
    }


def put_into_queue(head: Object, source: RunSource, settings: Settings) -> bool:
    """Names the run's queue, if it has one, in the metadata of what waits in it. Returns whether it has."""
    queue = source.manifest.spec.lifecycle.queue_name or settings.run_queue
    head["labels"] |= {QUEUE_LABEL: queue} if queue else {}
    return bool(queue)
