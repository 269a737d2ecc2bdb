"""The parts of a tool-call format, and values by a JSON schema, for formats that write no types."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]
"""Tool name → JSON schema of its parameters, an object; empty for a tool of which only the name is known."""


class NotACall(ValueError):
    """A call is invalid; the message explains it to the policy."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call as it was written. Example: `ParsedCall("add", {"a": 1, "b": 2})`"""

    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One syntax of calls."""

    name: str
    openings: tuple[str, ...]
    """Strings that begin the part of a text that calls tools; it ends with the text."""
    split: Callable[[str], list[str]]
    """The part of a text from an opening on → the text of each call; the end of the last may be missing."""
    parse: Callable[[str, Schemas], ParsedCall]
    """One call as `split` gives it. Raises NotACall, and nothing else, whatever the text."""
    signs: tuple[str, ...]
    """Strings that a chat template contains, all of them, if it writes calls in this format."""
    first: str = ""
    """An opening that counts only where the whole text begins with it, in a text of a model of this format."""
    fits: Callable[[str], bool] = lambda body: True
    """Whether a call looks like this format's. Only used if several formats have the same opening."""
    call_id: Callable[[str], str] = lambda body: ""
    """The id that the policy gave a call, by which the template names its result; empty in formats without ids."""
    message: Callable[[str], Mapping[str, Any]] = lambda text: {"content": text}
    """The fields with which the template takes an answer of this text."""
    markers: tuple[str, ...] = ()
    """Special tokens that a call consists of: a text without them cannot be read."""
    ends: tuple[str, ...] = ()
    """Special tokens with which a call ends the model's turn, besides its end-of-sequence tokens."""


def types_of(schema: object) -> frozenset[str]:
    """JSON types that a schema allows; empty if it does not restrict them."""
    if not isinstance(schema, Mapping):
        return frozenset()
    if options := schema.get("anyOf") or schema.get("oneOf"):
        each = [types_of(option) for option in options] if isinstance(options, list) else []
        return frozenset().union(*each) if all(each) else frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(str(each) for each in kind)
    values = schema.get("enum")
    return frozenset(_type_of(value) for value in values) if isinstance(values, list) else frozenset()


def schema_of(schemas: Schemas, tool: str, parameter: str) -> object:
    """The schema of a tool's parameter; None if there is none."""
    properties = schemas.get(tool, {}).get("properties")
    return properties.get(parameter) if isinstance(properties, Mapping) else None


def read_value(name: str, text: str, types: frozenset[str]) -> Any:
    """An argument's value: JSON of one of the types, else the text itself where a string is allowed.

    Args:
        name: the parameter's, for the error.
        types: not empty.

    Raises:
        NotACall: it is none of the types.
    """
    others = types - {"string"}
    if others:
        try:
            value = load(text)
        except ValueError:
            pass
        else:
            if _type_of(value) in others or (_type_of(value) == "integer" and "number" in others):
                return value
            if "integer" in others and isinstance(value, float) and value.is_integer():
                return int(value)
    if "string" in types:
        return text
    raise NotACall(f"the argument {name[:64]!r} is {' or '.join(sorted(types))} in JSON, and not {text[:80]!r}")


def load(text: str) -> Any:
    """JSON. Raises ValueError, also for what is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def load_arguments(text: str, of: str) -> Any:
    """Parses a call's arguments; empty text means none. Raises NotACall."""
    try:
        return load(text) if text.strip() else {}
    except ValueError as error:
        raise NotACall(f"the arguments of {of[:64]} are not JSON: {str(error)[:200]}") from None


def _type_of(value: object) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")
