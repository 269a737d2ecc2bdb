"""The manifest's fields as a table: what is allowed, by default, in which set, and what each means.

Belongs here: one description of every field, read from the pydantic models. The loader's messages, the CRD, the
reference page and the template of `orbit init` all come from it. Does not belong here: any of those.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple, cast

from orbit_runtime.spec.block import FieldSet
from orbit_runtime.spec.run import OrbitRun
from orbit_runtime.spec.status import RunStatus

Schema = dict[str, Any]


class FieldFacts(NamedTuple):
    """One field of the manifest that holds a value, not a block."""

    path: str
    """`spec.data.prompts[].uri`."""
    schema: Schema
    """JSON schema without references; a field that may be unset has `optional: true` beside its type."""
    required: bool


@cache
def schema_tree() -> Schema:
    """JSON schema of the manifest, references written out and `null` folded into `optional: true`."""
    whole = OrbitRun.model_json_schema(by_alias=True)
    tree = cast(Schema, _inline(whole, whole.get("$defs", {})))
    _show_only(tree["properties"]["spec"]["properties"]["evaluation"])
    return tree


@cache
def status_tree() -> Schema:
    """JSON schema of an OrbitRun's `status`, in the same form."""
    whole = RunStatus.model_json_schema(by_alias=True)
    return cast(Schema, _inline(whole, whole.get("$defs", {})))


@cache
def all_fields() -> tuple[FieldFacts, ...]:
    """Every field of the manifest that holds a value, in order."""
    return tuple(_walk(schema_tree(), "", required=True))


@cache
def field_sets() -> dict[str, FieldSet]:
    """Path (with `[]` for an index) → the set that the field is in."""
    found = ((field.path, field.schema.get("orbitSet")) for field in all_fields())
    return {path: cast(FieldSet, owner) for path, owner in found if owner}


@cache
def later_defaults() -> dict[str, Any]:
    """Path → default of each field that is part of the identity only where it is another (`LATER_IDENTITY`)."""
    later = {field.path: field.schema for field in all_fields() if field.schema.get("orbitLater")}
    return {path: _value_before(schema) for path, schema in later.items()}


def _value_before(schema: Schema) -> Any:
    if "orbitBefore" in schema:
        return schema["orbitBefore"]
    return schema.get("default", {} if schema["type"] == "object" else None)


def find_schema(path: tuple[str | int, ...]) -> Schema | None:
    """Schema of a place in the manifest; `None` where there is no such field."""
    here: Schema = schema_tree()
    for part in path:
        if isinstance(part, int):
            here = here.get("items", {})
        elif part in here.get("properties", {}):
            here = here["properties"][part]
        else:
            extra = here.get("additionalProperties")
            here = extra if isinstance(extra, dict) else {}
            if extra is True:
                return {}
        if not here:
            return None
    return here


def is_free(schema: Schema) -> bool:
    """Whether it holds whatever the user puts there."""
    return schema.get("additionalProperties") is True


def is_block(schema: Schema) -> bool:
    """Whether it has fields of its own."""
    return "properties" in schema


def is_left_out(schema: Schema) -> bool:
    """Whether it is a block that has no defaults and need not be there."""
    return is_block(schema) and bool(schema.get("optional")) and bool(schema.get("required"))


def format_path(path: tuple[str | int, ...]) -> str:
    """`("spec", "data", "prompts", 0, "uri")` → `spec.data.prompts[0].uri`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def format_kind(schema: Schema) -> str:
    """The kind of value in words: `whole number`, `list of texts`."""
    words = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
    kind = schema.get("type")
    if kind == "array":
        item = schema.get("items", {})
        return "list of blocks" if is_block(item) else f"list of {format_kind(item)}s"
    if kind == "object":
        return "block" if is_block(schema) else "mapping"
    return words.get(str(kind), "any value")


def format_allowed(schema: Schema) -> str:
    """The allowed values in words: "1 to 1024", "above 0, at most 1", "at most 64 characters"; empty without limits."""
    if "enum" in schema:
        return " ".join(f"`{value}`" for value in schema["enum"])
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f"{_number(low)} to {_number(high)}"
    parts = [f"{_number(low)} or more"] if low is not None else []
    parts += [f"above {_number(above)}"] if above is not None else []
    parts += [f"at most {_number(high)}"] if high is not None else []
    parts += [f"below {_number(below)}"] if below is not None else []
    for least, most, unit in (("minLength", "maxLength", "character"), ("minItems", "maxItems", "item")):
        parts += _counts(schema.get(least), schema.get(most), unit)
    parts += _counts(None, schema.get("maxProperties"), "entry")
    return ", ".join(parts)


def _counts(least: int | None, most: int | None, unit: str) -> list[str]:
    many = "entries" if unit == "entry" else f"{unit}s"
    if least and most:
        return [f"{least} to {most} {many}"]
    return [f"at most {most} {many}"] if most else []


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


def _show_only(schema: Schema) -> None:
    """Marks blocks of training within those of evaluation as display: there they do not change a run's numbers."""
    for child in schema.get("properties", {}).values():
        _show_only(child)
        if "orbitSet" in child:
            child["orbitSet"] = "display"
            child.pop("orbitLater", None)
    if "items" in schema:
        _show_only(schema["items"])


def _inline(schema: Any, definitions: Schema) -> Any:
    if isinstance(schema, list):
        return [_inline(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: value for key, value in schema.items() if key not in ("$defs", "title")}
    if "$ref" in schema:
        target = definitions[schema.pop("$ref").rpartition("/")[2]]
        schema = {**target, **schema}
        return _inline(schema, definitions)
    if "anyOf" in schema:
        (kind,) = [each for each in schema.pop("anyOf") if each != {"type": "null"}]
        schema = {**kind, **schema, "optional": True}
        if schema.get("default", 0) is None:
            del schema["default"]
        return _inline(schema, definitions)
    if schema.get("additionalProperties") == {"$ref": "#/$defs/JsonValue"}:
        schema["additionalProperties"] = True
    if "const" in schema:
        schema["enum"] = [schema.pop("const")]
    # A property may be called like a keyword, so only the values below `properties` are schemas.
    return {
        key: {name: _inline(child, definitions) for name, child in value.items()}
        if key == "properties"
        else value
        if key in ("default", "examples", "enum", "required")
        # A docstring's line breaks are the source's, and `kubectl explain` would show them.
        else " ".join(value.split())
        if key == "description"
        else _inline(value, definitions)
        for key, value in schema.items()
    }


def _walk(schema: Schema, path: str, *, required: bool) -> Iterator[FieldFacts]:
    if is_block(schema):
        names = schema.get("required", [])
        for name, child in schema["properties"].items():
            yield from _walk(child, f"{path}.{name}" if path else name, required=name in names)
    elif is_block(schema.get("items", {})):
        yield from _walk(schema["items"], f"{path}[]", required=required)
    else:
        yield FieldFacts(path, schema, required)
