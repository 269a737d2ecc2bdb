"""Calls as Qwen3-Coder and Qwen3.5 and later write them: tags that hold their names.

    <tool_call>
    <function=add>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

A value stands between two line breaks. It has no type: the tool's schema gives it, and without one it is text.
"""

from __future__ import annotations

import re
from typing import Any

from orbit_runtime.model_info.calls import hermes
from orbit_runtime.model_info.calls.format import (
    CallFormat,
    NotACall,
    ParsedCall,
    Schemas,
    read_value,
    schema_of,
    types_of,
)

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_HEAD = re.compile(r"\s*<function=([^>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL)
_LITERALS = {"true": "true", "false": "false", "null": "null", "none": "null"}
"""Templates write what is neither text, list nor object as Python does."""


def parse(body: str, schemas: Schemas) -> ParsedCall:
    """Parses a call.

    Raises:
        NotACall: it does not follow the syntax, names a parameter twice, or gives one that its schema does not allow.
    """
    head = _HEAD.match(body)
    if head is None:
        raise NotACall(f"a call is <function=NAME> in <tool_call>, and this begins with {body.strip()[:80]!r}")
    name = head[1].strip()
    arguments: dict[str, Any] = {}
    at = head.end()
    while parameter := _PARAMETER.match(body, at):
        key = parameter[1].strip()
        if key in arguments:
            raise NotACall(f"the parameter {key[:64]!r} is given twice")
        arguments[key] = _value(key, parameter[2], types_of(schema_of(schemas, name, key)))
        at = parameter.end()
    rest = body[at:].strip()
    if rest and not rest.startswith(_FUNCTION_END):
        raise NotACall(
            f"a parameter is <parameter=NAME>, a line with its value, </parameter>, and this is {rest[:80]!r}"
        )
    return ParsedCall(name, arguments)


def _value(key: str, text: str, types: frozenset[str]) -> Any:
    if not types:
        return text
    others = types - {"string"}
    is_literal = others & {"boolean", "null"} and text.lower() in _LITERALS
    return read_value(key, _LITERALS[text.lower()] if is_literal else text, types)


FORMAT = CallFormat(
    "Qwen3-Coder", (hermes.OPEN,), hermes.split, parse, signs=(hermes.OPEN, _FUNCTION, "<parameter="),
    fits=lambda body: _FUNCTION in body,
)  # fmt: skip
