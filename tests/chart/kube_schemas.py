"""Strict JSON schemas for kubeconform, made from the OpenAPI that each Kubernetes release carries in its own Go module.

The monitoring kinds come from the CRDs in the Prometheus operator's Go module. Nothing is built, only fetched.
Belongs here: OpenAPI → one schema per kind. Does not belong here: running kubeconform.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from chart.programs import find_program, run_well
from ruamel.yaml import YAML

Schema = dict[str, Any]

KUBERNETES = ("1.31.4", "1.34.1")
PROMETHEUS_OPERATOR = "v0.76.2"
MONITORS = ("servicemonitors", "podmonitors", "prometheusrules")
REVISION = 1
"""Part of the cache's name: raise it when the schemas are made differently."""

_OPEN = ("io.k8s.apimachinery.pkg.runtime.RawExtension", "io.k8s.apimachinery.pkg.apis.meta.v1.FieldsV1")
_EITHER = {
    "io.k8s.apimachinery.pkg.util.intstr.IntOrString": {"type": ["integer", "string"]},
    "io.k8s.apimachinery.pkg.api.resource.Quantity": {"type": ["number", "string"]},
}


def module_folder(module: str, version: str, folder: Path) -> Path:
    """Folder in which Go keeps the sources of a module; fetched if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "go.mod").write_text("module schemas\n")
    out = run_well(find_program("go"), "-C", folder, "mod", "download", "-json", f"{module}@{version}")
    return Path(json.loads(out)["Dir"])


def make_schemas(scratch: Path) -> Path:
    """Folder of schemas, kept in the user's cache: `v1.34.1/deployment-apps-v1.json`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orbit-rl"
    folder = cache / f"schemas-{'-'.join(KUBERNETES)}-{PROMETHEUS_OPERATOR}-r{REVISION}"
    if (folder / "complete").exists():
        return folder
    crds = module_folder("github.com/prometheus-operator/prometheus-operator", PROMETHEUS_OPERATOR, scratch)
    for version in KUBERNETES:
        source = module_folder("k8s.io/kubernetes", f"v{version}", scratch) / "api/openapi-spec/swagger.json"
        schemas = from_openapi(json.loads(source.read_text()))
        for plural in MONITORS:
            schemas |= from_crd(crds / f"example/prometheus-operator-crd/monitoring.coreos.com_{plural}.yaml")
        target = folder / f"v{version}"
        target.mkdir(parents=True, exist_ok=True)
        for name, schema in schemas.items():
            (target / f"{name}.json").write_text(json.dumps(schema))
    (folder / "complete").touch()
    return folder


def from_openapi(document: Schema) -> dict[str, Schema]:
    """kubeconform's name of a kind → its schema, self-contained."""
    definitions = {name: _strict(name, schema) for name, schema in document["definitions"].items()}
    found = {}
    for name, schema in document["definitions"].items():
        for kind in schema.get("x-kubernetes-group-version-kind", ()):
            group = kind["group"].split(".")[0]
            file = "-".join(part for part in (kind["kind"].lower(), group, kind["version"]) if part)
            needed = _reachable(name, definitions)
            found[file] = {"$ref": f"#/definitions/{name}", "definitions": {each: definitions[each] for each in needed}}
    return found


def from_crd(file: Path) -> dict[str, Schema]:
    """The same for a custom resource."""
    crd = YAML(typ="safe").load(file)["spec"]
    group = crd["group"].split(".")[0]
    found = {}
    for version in crd["versions"]:
        schema = _closed(version["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        found[f"{crd['names']['kind'].lower()}-{group}-{version['name']}"] = schema
    return found


def _strict(name: str, schema: Schema) -> Schema:
    if name in _EITHER:
        return _EITHER[name]
    return {} if name in _OPEN else _closed(schema)


def _closed(schema: Any) -> Any:
    """A copy that refuses properties which it does not name."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    closed = {key: _closed(value) for key, value in schema.items() if key not in ("description", "format", "default")}
    if isinstance(schema.get("properties"), dict):
        closed["properties"] = {key: _closed(value) for key, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            closed.setdefault("additionalProperties", False)
    return closed


def _reachable(name: str, definitions: dict[str, Schema]) -> set[str]:
    found: set[str] = set()
    todo = [name]
    while todo:
        each = todo.pop()
        if each not in found:
            found.add(each)
            todo += _references(definitions[each])
    return found


def _references(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [name for each in schema for name in _references(each)]
    if not isinstance(schema, dict):
        return []
    own = schema.get("$ref")
    here = [own.removeprefix("#/definitions/")] if isinstance(own, str) else []
    return here + [name for each in schema.values() for name in _references(each)]
