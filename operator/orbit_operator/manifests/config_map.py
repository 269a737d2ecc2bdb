"""The ConfigMap that holds the run's manifest, as its pods read it."""

from __future__ import annotations

import orjson

from orbit_operator.manifests.mounts import localise
from orbit_operator.manifests.source import Object, RunSource, config_map_name, metadata, metrics_port_of
from orbit_runtime.spec.run import API_VERSION

MANIFEST_FILE = "run.yaml"
LARGEST_MANIFEST = 1 << 20
"""Bytes that the API server allows in a ConfigMap; `orbit run` reads no more either."""


def build_config_map(source: RunSource) -> Object:
    """The same for every attempt of a run: the block that may change (`lifecycle`) is left to the operator."""
    spec = {name: value for name, value in localise(source.spec).items() if name != "lifecycle"}
    if (port := metrics_port_of(source.spec)) is not None:
        spec["observability"] = {**spec.get("observability", {}), "metricsPort": port}
    manifest = {
        "apiVersion": API_VERSION,
        "kind": "OrbitRun",
        "metadata": {"name": source.name, "namespace": source.namespace},
        "spec": spec,
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(source, config_map_name(source.name), component="manifest"),
        # JSON is valid YAML.
        "data": {MANIFEST_FILE: orjson.dumps(manifest, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS).decode()},
    }
