"""Turns a refused value into a sentence: what is wrong, where, what is allowed, what was probably meant.

Belongs here: the words of every problem with a manifest. Does not belong here: finding them (`load`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from orbit_runtime.errors import ManifestError
from orbit_runtime.spec.fields import (
    Schema,
    all_fields,
    find_schema,
    format_allowed,
    format_kind,
    format_path,
    is_block,
)

Path = tuple[str | int, ...]

_SHOWN = 60
_OBJECT_NAME = "the name of a Kubernetes object: lower-case letters, digits, `-` and `.`"
_LABEL_VALUE = "letters, digits, `-`, `_` and `.`, with a letter or digit at both ends"
_QUANTITY = "a number of bytes such as `512Mi` or `64Gi`"
_VARIABLE = "the name of an environment variable, not its value: letters, digits and `_`"
_SERVER_HINTS = {
    "url": "`http://host:port`, without a path",
    "apiKeyEnv": _VARIABLE,
    "headers[].name": "letters, digits and `-`",
    "headers[].value": "printable ASCII without spaces",
    "headers[].valueEnv": _VARIABLE,
}
_HINTS = {
    **{f"spec.rollout.endpoints[].{field}": hint for field, hint in _SERVER_HINTS.items()},
    **{f"spec.algorithm.teacher.endpoints[].{field}": hint for field, hint in _SERVER_HINTS.items()},
    "spec.rollout.adapterFolder": "an absolute path",
    "spec.observability.notify[].url": "`https://host/path`",
    "spec.observability.notify[].urlEnv": _VARIABLE,
    "metadata.name": "lower-case letters, digits and `-`, with a letter or digit at both ends",
    "metadata.namespace": "lower-case letters, digits and `-`, with a letter or digit at both ends",
    "metadata.labels.*": _LABEL_VALUE,
    "spec.algorithm.entrypoint": "`module:function`, such as `my_objective:loss`",
    "spec.algorithm.advantage.entrypoint": "`module:function`, such as `my_objective:advantages`",
    "spec.environment.entrypoint": "`module:Class`, such as `my_games:Guess`",
    "spec.environment.tools[]": "`module:function`, such as `my_tools:search`",
    "spec.environment.limits.memory": _QUANTITY,
    "spec.environment.variables[]": _VARIABLE,
    "spec.environment.rewards[].entrypoint": "`module:function`, such as `my_rewards:brevity`",
    "spec.environment.rewards[].name": "letters, digits, `_` and `-`, with a letter first",
    "spec.adapter.targets[]": "the end of a module name: letters, digits, `_` and `.`",
    "spec.storage.credentialsSecretName": _OBJECT_NAME,
    "spec.storage.serviceAccountName": _OBJECT_NAME,
    "spec.placement.gpuProduct": _LABEL_VALUE,
    "spec.placement.image": "an image such as `registry.example.com/orbit-runtime:1.0`",
    "spec.placement.resources.memory": _QUANTITY,
    "spec.placement.resources.ephemeralStorage": _QUANTITY,
    "spec.placement.resources.sharedMemory": _QUANTITY,
    "spec.placement.modelCache.claimName": _OBJECT_NAME,
    "spec.placement.modelCache.sizeLimit": _QUANTITY,
    "spec.placement.envFromSecrets[]": _OBJECT_NAME,
    "spec.placement.egress[].cidr": "a network such as `10.0.0.0/8`",
    "spec.placement.egress[].namespace": "lower-case letters, digits and `-`, with a letter or digit at both ends",
    "spec.placement.nodeSelector.*": _LABEL_VALUE,
    "spec.placement.tolerations[].value": _LABEL_VALUE,
    "spec.lifecycle.queueName": _LABEL_VALUE,
    "spec.lifecycle.managedBy": "a domain, `/` and a name, such as `kueue.x-k8s.io/multikueue`",
}
_HINTS |= {
    "spec.evaluation.environments[].name": "lower-case letters, digits and `-`, with a letter or digit at both ends",
    **{
        f"spec.evaluation.environments[]{path.removeprefix('spec')}": hint
        for path, hint in _HINTS.items()
        if path.startswith("spec.environment.")
    },
}
"""What a pattern means, by path."""
_SUCCESSORS = {"Broadcast": "SharedMemory"}
"""Value of earlier versions → its successor."""


def show_value(value: Any) -> str:
    """A value as it would stand in the file, shortened: text in quotes, so that `'5'` and `5` differ."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return f"`{text if len(text) <= _SHOWN else text[: _SHOWN - 1] + '…'}`"


def find_near(word: str, choices: Iterable[str]) -> str | None:
    """The choice that was probably meant: other case, `snake_case` for `camelCase`, or a typo."""
    plain = {choice.lower().replace("_", ""): choice for choice in choices}
    asked = word.lower().replace("_", "").replace("-", "")
    near = get_close_matches(asked, plain, n=1, cutoff=0.6)
    return plain[near[0]] if near else None


def find_elsewhere(name: str) -> str | None:
    """Path of a field of that name in another block: of several the outermost, which most manifests have."""
    paths = [field.path for field in all_fields() if field.path.rpartition(".")[2] == name]
    return min(paths, key=lambda path: path.count("."), default=None)


def explain(kind: str, path: Path, value: Any) -> tuple[str, str | None]:
    """Message and fix for one of pydantic's findings, e.g. `explain("literal_error", path, "lora")`."""
    schema = find_schema(path) or {}
    if kind == "extra_forbidden":
        return _explain_unknown(path)
    if kind == "missing":
        return _explain_missing(path, schema)
    if value is None:
        return "the value is empty", _say_what_to_write(path, schema)
    if kind == "literal_error":
        near = _SUCCESSORS.get(str(value)) or find_near(str(value), map(str, schema["enum"]))
        allowed = f"allowed: {format_allowed(schema)}"
        return f"{show_value(value)} is not one of its values", f"did you mean `{near}`? {allowed}" if near else allowed
    if kind.startswith("string_pattern"):
        return f"{show_value(value)} is not allowed", f"write {_HINTS[_shape(path)]}"
    if kind in _BOUNDS:
        return _BOUNDS[kind](value), f"allowed: {format_allowed(schema) or 'what JSON can say'}"
    return f"{show_value(value)} is {_kind_of(value)}", _say_what_to_write(path, schema)


_BOUNDS: Mapping[str, Callable[[Any], str]] = {
    **dict.fromkeys(
        ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number"),
        lambda value: f"{show_value(value)} is out of range",
    ),
    **dict.fromkeys(
        ("string_too_short", "string_too_long"),
        lambda value: f"{show_value(value)} has {len(value)} characters" if value else "the text is empty",
    ),
    **dict.fromkeys(("too_short", "too_long"), lambda value: f"it holds {len(value)}" if value else "it holds nothing"),
}


def _explain_unknown(path: Path) -> tuple[str, str]:
    name, parent = str(path[-1]), find_schema(path[:-1]) or {}
    known = list(parent.get("properties", {}))
    near = find_near(name, known)
    if near:
        return "unknown field", f"did you mean `{near}`?"
    elsewhere = find_elsewhere(name)
    if elsewhere:
        return "unknown field here", f"did you mean `{elsewhere}`?"
    return "unknown field", f"its block has the fields {', '.join(known)}"


def _explain_missing(path: Path, schema: Schema) -> tuple[str, str]:
    if is_block(schema):
        needed = ", ".join(f"`{name}`" for name in schema.get("required", []))
        return "this block is missing", f"add `{path[-1]}:` with {needed}"
    return "this field is missing", _say_what_to_write(path, schema)


def _say_what_to_write(path: Path, schema: Schema) -> str:
    """`write a whole number, 1 to 1024, e.g. `steps: 100``."""
    if is_block(schema):
        return f"write its fields below it: {', '.join(schema['properties'])}"
    kind, allowed = format_kind(schema), format_allowed(schema)
    article = "" if kind in ("text", "true or false") else "a "
    text = f"write {article}{kind}" + (f", {allowed}" if allowed else "")
    example = schema.get("examples", [None])[0] if "examples" in schema else schema.get("default")
    if example is None or isinstance(path[-1], int):
        return text
    return f"{text}, e.g. `{path[-1]}: {json.dumps(example) if not isinstance(example, str) else example}`"


def _kind_of(value: Any) -> str:
    names = {bool: "a boolean", int: "a whole number", float: "a number", str: "text", list: "a list"}
    return names.get(type(value), "a block")


def _shape(path: Path) -> str:
    """The place as `_HINTS` names it: `spec.adapter.targets[]`, `metadata.labels.*`."""
    text = ""
    for index, part in enumerate(path):
        if isinstance(part, int):
            text += "[]"
        else:
            known = part in (find_schema(path[:index]) or {}).get("properties", {})
            text += f".{part}" if known else ".*"
    return text.removeprefix(".")


def locate(path: Path, lines: Mapping[Path, int]) -> int | None:
    """Line of a place in the file, or of the nearest block around it."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None


def build_problem(
    path: Path, message: str, fix: str | None, *, name: str, lines: Mapping[Path, int], given: Mapping[Path, str]
) -> ManifestError:
    """One finding with its place: `run.yaml:12: spec.training.steps`, or `--set training.steps=x: …`."""
    field = format_path(path)
    for length in range(len(path), 0, -1):
        if path[:length] in given:
            return ManifestError(message, where=f"--set {given[path[:length]]}: {field}", fix=fix)
    inside = next((each for each in given if each[: len(path)] == path), None)
    if inside is not None and path not in lines:
        return ManifestError(message, where=f"--set {given[inside]}: {field}", fix=fix)
    line = locate(path, lines)
    place = f"{name}:{line}" if line else f"{name}:1"
    return ManifestError(message, where=f"{place}: {field}" if field else place, fix=fix)
