"""Calls as Hermes and Qwen2.5 and 3 write them: a JSON object in tags.

<tool_call>
{"name": "add", "arguments": {"a": 1}}
</tool_call>
"""

from __future__ import annotations

import json
from typing import Any

from orbit_runtime.model_info.calls.format import CallFormat, NotACall, ParsedCall, Schemas, load

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def split(text: str) -> list[str]:
    """Each call between the tags."""
    return [piece.partition(CLOSE)[0] for piece in text.split(OPEN)[1:]]


def parse(body: str, schemas: Schemas) -> ParsedCall:
    """Arguments may also be JSON in a string, as OpenAI's interface has them."""
    try:
        call = load(body)
        if isinstance(call, dict) and isinstance(call.get("arguments"), str):
            call["arguments"] = load(call["arguments"])
    except ValueError as error:
        raise NotACall(f"the call is not JSON: {str(error)[:200]}") from None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise NotACall('a call is an object with "name" and "arguments"')
    return ParsedCall(call["name"], call.get("arguments", {}))


def write(name: str, arguments: Any) -> str:
    """A call that `split` and `parse` read."""
    return f"{OPEN}\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n{CLOSE}"


FORMAT = CallFormat(
    "Hermes", (OPEN,), split, parse, signs=(OPEN, '"arguments"'), fits=lambda body: body.lstrip().startswith("{")
)
