"""The heavy packages of these tests' own environment, mounted read-only into pods.

Torch and its libraries are gigabytes: an image with them inside would take longer to import than all tests take.
A hostPath volume in a pod is forbidden under *restricted*; a claim on a volume of that kind is not.
"""

from __future__ import annotations

import sysconfig
from typing import Any

MOUNT_PATH = "/opt/heavy"
CLAIM = "heavy"
Object = dict[str, Any]


def build_heavy_claim(namespace: str) -> list[Object]:
    """A volume and the claim that is bound to it."""
    name = f"{CLAIM}-{namespace}"
    shared: Object = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    volume = {
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
        "spec": {
            **shared, "capacity": {"storage": "20Gi"}, "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": sysconfig.get_path("purelib"), "type": "Directory"},
        },
    }  # fmt: skip
    claim = {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CLAIM, "namespace": namespace},
        "spec": {**shared, "volumeName": name, "resources": {"requests": {"storage": "20Gi"}}},
    }  # fmt: skip
    return [volume, claim]


def heavy_volume() -> Object:
    return {"name": CLAIM, "persistentVolumeClaim": {"claimName": CLAIM, "readOnly": True}}


def heavy_mount() -> Object:
    return {"name": CLAIM, "mountPath": MOUNT_PATH, "readOnly": True}
