"""The Job that deletes a run's artifacts from the store when the run is deleted and its manifest requests this."""

from __future__ import annotations

from orbit_operator.manifests.mounts import build_mounts
from orbit_operator.manifests.pod import (
    build_container,
    build_node_selector,
    build_pod_metadata,
    build_tolerations,
    container_security,
    customise,
    installed_variables,
    pod_security,
)
from orbit_operator.manifests.ray_cluster import NOT_OF_HEAD
from orbit_operator.manifests.source import Object, RunSource, cleanup_name, labels, metadata, run_folder
from orbit_operator.settings import Settings

COMPONENT = "cleanup"
DEADLINE_SECONDS = 540
"""Shorter than the time for which the run's deletion waits."""
FAILURE_RULES: list[Object] = [
    {"action": "FailJob", "onExitCodes": {"containerName": COMPONENT, "operator": "In", "values": [64, 73, 77, 78]}},
]
"""Failures that a retry would not fix: there is no run folder, or no right to it."""


def build_cleanup_job(source: RunSource, settings: Settings) -> Object:
    """The Job has exactly the run's rights to the store, and may be placed wherever the run may, with any GPU or none.

    It has no priority class: it must not preempt anything that trains.
    """
    storage, placement = source.manifest.spec.storage, source.manifest.spec.placement
    run = build_container(source, 0, [], settings)
    volumes, mounts = build_mounts({}, settings)
    container = {
        "name": COMPONENT,
        "image": run["image"],
        "imagePullPolicy": run["imagePullPolicy"],
        "command": ["python", "-m", "orbit_runtime.storage.delete"],
        "args": [run_folder(storage.uri, source.name)],
        "env": installed_variables(settings),
        "envFrom": run["envFrom"],
        "resources": {name: {"cpu": "500m", "memory": "512Mi"} for name in ("requests", "limits")},
        "securityContext": container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *mounts],
    }
    pod: Object = {
        # A failed pod stays until its Job is deleted, and tells why it failed.
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(settings),
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}, *volumes],
        "tolerations": build_tolerations(placement, settings),
    }
    if selector := build_node_selector(placement, settings):
        pod["nodeSelector"] = selector
    if storage.service_account_name:
        pod["serviceAccountName"] = storage.service_account_name
    if settings.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    template = {"metadata": build_pod_metadata(labels(source, component=COMPONENT), settings), "spec": pod}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(source, cleanup_name(source.name), component=COMPONENT),
        "spec": {
            "backoffLimit": 3,
            "activeDeadlineSeconds": DEADLINE_SECONDS,
            "podFailurePolicy": {"rules": FAILURE_RULES},
            "template": customise(source, template, (*NOT_OF_HEAD, "priorityClassName", "runtimeClassName")),
        },
    }
