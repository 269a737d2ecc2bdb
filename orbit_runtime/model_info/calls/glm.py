"""Calls as GLM-4.5 and later write them: a name, and each argument in tags.

    <tool_call>add
    <arg_key>a</arg_key>
    <arg_value>1</arg_value>
    </tool_call>

A value is text as it stands where the schema says string, else JSON. GLM-4.7 leaves the line breaks out.
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
    load,
    read_value,
    schema_of,
    types_of,
)

_KEY = "<arg_key>"
_KEY_END, _VALUE, _VALUE_END = "</arg_key>", "<arg_value>", "</arg_value>"
_NAME = re.compile(r"\s*[\w.\-/:]{1,128}\s*\Z")


def parse(body: str, schemas: Schemas) -> ParsedCall:
    """Parses a call.

    Raises:
        NotACall: it does not follow the syntax, names an argument twice, or gives one that its schema does not allow.
    """
    name = body.partition(_KEY)[0].strip()
    if not _NAME.match(name):
        raise NotACall(
            "a call is <tool_call>NAME, then <arg_key>…</arg_key> and <arg_value>…</arg_value> for each argument, and "
            f"this begins with {name[:80]!r}"
        )
    arguments: dict[str, Any] = {}
    rest = body[body.find(_KEY) :] if _KEY in body else ""
    while rest:
        key, value, rest = _take(rest)
        if key in arguments:
            raise NotACall(f"the argument {key[:64]!r} is given twice")
        arguments[key] = _value(key, value, types_of(schema_of(schemas, name, key)))
    return ParsedCall(name, arguments)


def _take(text: str) -> tuple[str, str, str]:
    """Key and value of the first argument, and what follows it. A pattern would try each end tag with each other."""
    key, has_key, after = text.removeprefix(_KEY).partition(_KEY_END)
    value, has_value, rest = after.lstrip().removeprefix(_VALUE).partition(_VALUE_END)
    if not (text.startswith(_KEY) and has_key and after.lstrip().startswith(_VALUE) and has_value):
        raise NotACall(
            f"an argument is <arg_key>…</arg_key> and <arg_value>…</arg_value>, and this is {text.strip()[:80]!r}"
        )
    return key.strip(), value, rest.lstrip()


def _value(key: str, text: str, types: frozenset[str]) -> Any:
    if types:
        return read_value(key, text, types)
    try:
        return load(text)
    except ValueError:
        return text


FORMAT = CallFormat(
    "GLM", (hermes.OPEN,), hermes.split, parse, signs=(hermes.OPEN, _KEY),
    fits=lambda body: _KEY in body or bool(_NAME.match(body)),
)  # fmt: skip
