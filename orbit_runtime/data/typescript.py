"""Tools in TypeScript, as Kimi-K2.5 and K2.6 read them: the text `tools_ts_str` of their chat template.

The publisher's tokenizer class writes it, in code that is never run. What this writes is equal to it, whatever the
schemas, down to what it leaves out; `tests/unit_runtime/data/test_typescript.py` holds texts that the published code
wrote.

Belongs here: JSON schemas to that text. Does not belong here: when a template needs it (`chat`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

INDENT = "  "
_SELF = "#"
_DEFINITIONS = "#/$defs/"
_LIMITS = {
    "string": ("maxLength", "minLength", "pattern"), "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"), "array": ("maxItems", "minItems"),
}  # fmt: skip
"""Type → bounds that are written as a comment, in alphabetical order."""
_UNION = {
    "string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null", "object": "{}",
    "array": "Array<any>",
}  # fmt: skip
_PYTHON: dict[str, type | tuple[type, ...]] = {"string": str, "number": (int, float), "integer": int, "boolean": bool}


class NotWritable(ValueError):
    """A schema uses what the publisher's code refuses; its template then writes JSON."""


def write_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """The declaration of all functions among the tools; empty if there are none. Keys are in alphabetical order, as
    in `sorted_keys`.

    Raises:
        NotWritable: what the publisher's code refuses.
    """
    functions = [tool.get("function") for tool in sorted_keys(list(tools)) if tool.get("type") == "function"]
    try:
        written = [_Function(function).write() for function in functions if function]
    except (AttributeError, KeyError, TypeError) as error:
        raise NotWritable(f"no schema: {error}") from None
    if not written:
        return ""
    return "# Tools\n\n## functions\nnamespace functions {\n" + "\n".join(written) + "\n}\n"


def sorted_keys(value: Any) -> Any:
    """JSON with the keys of all objects in alphabetical order."""
    if isinstance(value, Mapping):
        return {key: sorted_keys(each) for key, each in sorted(value.items())}
    return [sorted_keys(each) for each in value] if isinstance(value, list) else value


class _Function:
    """One function, and the definitions that its schema refers to."""

    def __init__(self, function: Mapping[str, Any]) -> None:
        self._function = function
        self._root = function.get("parameters") or {}
        self._definitions: dict[str, Any] = {}
        self._refers_to_itself = False

    def write(self) -> str:
        name = self._function.get("name", "function")
        self._check_object(self._root)
        has_name = self._refers_to_itself
        interfaces = [f"interface parameters {{{self._lines(self._root)}}}"] if has_name else []
        for of, schema in dict(self._definitions).items():
            self._check(schema)
            comment = _comment(schema.get("description", ""), "")
            interfaces.append(f"{comment}interface {of} {self._type(schema, '')}")
        parameters = "parameters" if has_name else self._object(self._root, "")
        description = _comment(self._function.get("description") or "", "").removesuffix("\n")
        parts = ("\n".join(interfaces), description, f"type {name} = (_: {parameters}) => any;")
        return "\n".join(filter(None, parts))

    def _check(self, schema: Any) -> None:
        """Collects definitions, and refuses what cannot be written, in the order in which the schema has them."""
        if isinstance(schema, bool):
            return
        if not isinstance(schema, Mapping):
            raise NotWritable(f"no schema: {str(schema)[:80]}")
        if "$ref" in schema:
            self._check_reference(schema["$ref"])
        elif "anyOf" in schema:
            for option in schema["anyOf"]:
                self._check(option)
        elif "enum" in schema:
            _check_enum(schema)
        elif "type" in schema:
            self._check_typed(schema)
        elif schema:
            raise NotWritable(f"a schema without a type: {str(schema)[:80]}")

    def _check_typed(self, schema: Mapping[str, Any]) -> None:
        kind = schema["type"]
        if isinstance(kind, list):
            if unknown := [each for each in kind if each not in _UNION]:
                raise NotWritable(f"no type: {unknown[0]}")
        elif kind == "object":
            self._check_object(schema)
        elif kind == "array" and schema.get("items"):
            self._check(schema["items"])

    def _check_object(self, schema: Mapping[str, Any]) -> None:
        self._definitions |= schema.get("$defs") or {}
        others = schema.get("additionalProperties")
        if isinstance(others, Mapping):
            self._check(others)
        for each in schema.get("properties", {}).values():
            self._check(each)

    def _check_reference(self, to: str) -> None:
        if to == _SELF:
            self._refers_to_itself = True
        elif not to.startswith(_DEFINITIONS) or to.rpartition("/")[2] not in self._definitions:
            raise NotWritable(f"a reference to what is not there: {to}")

    def _type(self, schema: Any, indent: str) -> str:
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if "$ref" in schema:
            return "parameters" if schema["$ref"] == _SELF else str(schema["$ref"]).rpartition("/")[2]
        if "anyOf" in schema:
            return " | ".join(self._type(option, indent) for option in schema["anyOf"])
        if "enum" in schema:
            return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])
        kind = schema.get("type", "any")
        if isinstance(kind, list):
            return " | ".join(_UNION[each] for each in kind)
        if kind == "object":
            return self._object(schema, indent)
        if kind == "array":
            return self._array(schema, indent)
        return "number" if kind == "integer" else str(kind)

    def _object(self, schema: Mapping[str, Any], indent: str) -> str:
        lines = self._lines(schema, indent, is_whole=True)
        return f"{{{lines}{indent}}}" if lines else "{}"

    def _lines(self, schema: Mapping[str, Any], indent: str = "", *, is_whole: bool = False) -> str:
        """The fields between braces. Args: is_whole: required ones first, and then what else is allowed."""
        required, deeper = schema.get("required", []), indent + INDENT
        fields = [(name not in required, name, each) for name, each in schema.get("properties", {}).items()]
        if is_whole:
            fields.sort(key=lambda field: field[:2])
        lines = [self._field(name, each, deeper, is_optional=optional) for optional, name, each in fields]
        others = schema.get("additionalProperties")
        if is_whole and others is not None:
            if not isinstance(others, bool | Mapping):
                raise NotWritable(f"no additionalProperties: {others}")
            kind = ("any" if others else "never") if isinstance(others, bool) else self._type(others, deeper)
            lines.append(f"{deeper}[k: string]: {kind}")
        return "\n" + ",\n".join(lines) + "\n" if lines else ""

    def _field(self, name: str, schema: Any, indent: str, *, is_optional: bool) -> str:
        default = schema.get("default") if isinstance(schema, Mapping) else None
        comment = _notes(schema, indent)
        if default is not None:
            told = repr(default) if isinstance(default, int | float) else json.dumps(default, ensure_ascii=False)
            comment += f"{indent}// Default: {told}\n"
        return f"{comment}{indent}{name}{'?' if is_optional else ''}: {self._type(schema, indent)}"

    def _array(self, schema: Mapping[str, Any], indent: str) -> str:
        item = schema.get("items") or True
        notes = _notes(item, indent + INDENT)
        if not notes:
            return f"Array<{self._type(item, indent)}>"
        return f"Array<\n{notes}{indent}{INDENT}{self._type(item, indent + INDENT)}\n{indent}>"


def _notes(schema: Any, indent: str) -> str:
    """The description of a type and its bounds, as comments."""
    if not isinstance(schema, Mapping):
        return ""
    plain = not {"$ref", "anyOf", "enum"} & {*schema}
    kind = schema.get("type") if plain else None
    names = _LIMITS.get(kind, ()) if isinstance(kind, str) else ()
    limits = ", ".join(f"{name}: {schema[name]}" for name in names if name in schema)
    return _comment(schema.get("description", ""), indent) + (f"{indent}// {limits}\n" if limits else "")


def _comment(text: str, indent: str) -> str:
    if not text:
        return ""
    return "\n".join(f"{indent}// {line}" if line else "" for line in text.split("\n")) + "\n"


def _check_enum(schema: Mapping[str, Any]) -> None:
    kind = schema.get("type")
    if isinstance(kind, list):
        named = [each for each in kind if each != "null"]
        if len(kind) > 2 or (len(kind) == 2 and "null" not in kind) or not kind:
            raise NotWritable(f"no type of an enum: {kind}")
        kind = kind[0] if len(kind) == 1 or not named else named[0]
    python = _PYTHON.get(kind) if isinstance(kind, str) else None
    for value in schema["enum"]:
        if python is not None and value is not None and not isinstance(value, python):
            raise NotWritable(f"{value!r} in an enum is no {kind}")
