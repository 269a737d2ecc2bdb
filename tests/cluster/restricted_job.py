"""A namespace that admits *restricted* pods only, and a Job with one such pod. What it runs is the test's."""

from __future__ import annotations

import json
from typing import Any

from cluster.bed.cluster import Cluster, wait_for

Object = dict[str, Any]


def build_namespace(name: str) -> Object:
    labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn", "audit")}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def build_job(namespace: str, name: str, container: Object, *, user: int = 65532, group: int = 65532) -> Object:
    """The pod's read-only root and folders are those of a run's pod, and so is its user unless another is named."""
    mounts = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}]
    security = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "run", "imagePullPolicy": "Never", "securityContext": security,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **container, "volumeMounts": mounts,
    }  # fmt: skip
    pod = {
        "restartPolicy": "Never", "automountServiceAccountToken": False, "enableServiceLinks": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": group, "fsGroup": user,
                            "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }  # fmt: skip
    return {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "namespace": namespace},
        "spec": {"backoffLimit": 0, "podReplacementPolicy": "Failed", "template": {"spec": pod}},
    }  # fmt: skip


def wait_for_end(cluster: Cluster, namespace: str, job: str, seconds: float = 120.0) -> Object:
    """How the pod's only container ended: `exitCode`, `message`."""

    def ended() -> Object | None:
        pods = cluster.get("pods", "-n", namespace, "-l", f"job-name={job}")["items"]
        states = [status["state"] for pod in pods for status in pod["status"].get("containerStatuses", [])]
        return next((state["terminated"] for state in states if "terminated" in state), None)

    try:
        return dict(wait_for(ended, f"the pod of {job} ends", seconds))
    except AssertionError as error:
        found = cluster.get("pods", "-n", namespace)["items"]
        raise AssertionError(f"{error}; {json.dumps([pod['status'] for pod in found])[:3000]}") from None


def read_logs(cluster: Cluster, namespace: str, job: str) -> str:
    return cluster.kubectl("logs", "-n", namespace, f"job/{job}")
