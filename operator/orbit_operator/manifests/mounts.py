"""Volume claims and ConfigMaps that a manifest or an installation names, and where the pod finds them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from orbit_operator.manifests.source import Object
from orbit_operator.settings import Settings

_URI = re.compile(r"^(pvc|configmap)://([^/]+)(/.*)?$")
AUTHORITIES_FOLDER = "/etc/orbit-ca"
_FOLDERS = {"pvc": "/mnt/claims", "configmap": "/mnt/configmaps"}


def localise(value: Any) -> Any:
    """The value with every such URI replaced by its path in the pod."""
    if isinstance(value, Mapping):
        return {name: localise(child) for name, child in value.items()}
    if isinstance(value, list):
        return [localise(child) for child in value]
    match = _URI.match(value) if isinstance(value, str) else None
    return value if match is None else f"file://{_FOLDERS[match[1]]}/{match[2]}{match[3] or ''}"


def build_mounts(spec: Mapping[str, Any], settings: Settings) -> tuple[list[Object], list[Object]]:
    """Volumes and their read-only mounts: authorities to trust, then what the manifest names, in its order."""
    found = dict.fromkeys(_sources(spec))
    volumes, mounts = list[Object](), list[Object]()
    if name := settings.run_ca_config_map:
        volumes.append({"name": "authorities", "configMap": {"name": name}})
        mounts.append({"name": "authorities", "mountPath": AUTHORITIES_FOLDER, "readOnly": True})
    for kind, name in found:
        # The limit on a volume's name is shorter than that on an object's.
        volume = f"{kind}-{hashlib.sha256(name.encode()).hexdigest()[:10]}"
        source = {"persistentVolumeClaim": {"claimName": name, "readOnly": True}}
        volumes.append({"name": volume, **(source if kind == "pvc" else {"configMap": {"name": name}})})
        mounts.append({"name": volume, "mountPath": f"{_FOLDERS[kind]}/{name}", "readOnly": True})
    return volumes, mounts


def _sources(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for child in value.values():
            yield from _sources(child)
    elif isinstance(value, list):
        for child in value:
            yield from _sources(child)
    elif isinstance(value, str) and (match := _URI.match(value)):
        yield match[1], match[2]
