"""Calls as DeepSeek-V4 writes them, in DSML: tags whose names begin with one token, `｜DSML｜`.

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="add">
    <｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

A parameter with `string="true"` is text as it stands; another is JSON.
"""

from __future__ import annotations

import re
from typing import Any

from orbit_runtime.model_info.calls.format import CallFormat, NotACall, ParsedCall, Schemas, load

OPEN, CLOSE = "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"
_CALL, _CALL_END = "<｜DSML｜invoke", "</｜DSML｜invoke>"
_CALL_HEAD = re.compile(r'\s+name="([^"]*)"\s*(/?)>')
_PARAMETER = re.compile(
    r'\s*<｜DSML｜parameter\s+name="([^"]*)"\s+string="(true|false)"\s*>(.*?)</｜DSML｜parameter>', re.DOTALL
)


def split(text: str) -> list[str]:
    """Each call of the block with which this text begins, without the tag's first word; its end may be missing."""
    block = text.removeprefix(OPEN).partition(CLOSE)[0]
    return [piece.partition(_CALL_END)[0] for piece in block.split(_CALL)[1:]]


def parse(body: str, schemas: Schemas) -> ParsedCall:
    """
    Raises:
        NotACall: it does not follow the syntax, names a parameter twice, or gives one that is not JSON.
    """
    head = _CALL_HEAD.match(body)
    if head is None:
        raise NotACall('a call begins with <｜DSML｜invoke name="…">')
    arguments: dict[str, Any] = {}
    at = head.end()
    while parameter := _PARAMETER.match(body, at):
        name, is_text, value = parameter.groups()
        if name in arguments:
            raise NotACall(f"the parameter {name[:64]!r} is given twice")
        arguments[name] = value if is_text == "true" else _load(name, value)
        at = parameter.end()
    if body[at:].strip():
        raise NotACall(
            'a parameter is <｜DSML｜parameter name="…" string="true|false">…</｜DSML｜parameter>, '
            f"this is {body[at:].strip()[:80]!r}"
        )
    return ParsedCall(head[1], arguments)


def _load(name: str, value: str) -> Any:
    try:
        return load(value)
    except ValueError as error:
        raise NotACall(f'the parameter {name[:64]!r} has string="false" and is not JSON: {str(error)[:200]}') from None


FORMAT = CallFormat("DSML", (OPEN,), split, parse, signs=(OPEN,), markers=("｜DSML｜",))
