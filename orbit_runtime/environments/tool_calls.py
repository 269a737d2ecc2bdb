"""Tool calls in a completion, in the format of Hermes and Qwen: `<tool_call>{"name": …}</tool_call>`.

Belongs here: text to calls, and errors in them worded for the policy. Does not belong here: making the calls
(`workers`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CALL_CHARACTERS = 1 << 16
MAX_CALLS = 32
"""Maximum calls in one completion; further ones get an error."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the policy wrote.

    Example: `ToolCall("add", {"a": 1, "b": 2})`, or `ToolCall("ad", {}, "no tool is called 'ad'; there are: add")`
    """

    name: str
    """The tool's name as far as it can be read, else empty."""
    arguments: Mapping[str, Any]
    error: str = ""
    """Why the call cannot be made."""


def parse_tool_calls(text: str, names: Collection[str]) -> list[ToolCall]:
    """All calls of a completion. Empty if it calls nothing, which makes it the last one of the episode.

    A call at the end of the text needs no closing tag: a stop string may have cut it off.

    Args:
        names: names of the available tools.
    """
    calls: list[ToolCall] = []
    for piece in text.split(OPEN)[1:]:
        body = piece.partition(CLOSE)[0]
        if len(calls) >= MAX_CALLS:
            calls.append(ToolCall("", {}, f"more than {MAX_CALLS} calls at once"))
            break
        calls.append(_parse(body, names))
    return calls


def write_tool_call(name: str, arguments: Any) -> str:
    """Writes a call in the form that `parse_tool_calls` reads."""
    return f"{OPEN}\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n{CLOSE}"


def _parse(body: str, names: Collection[str]) -> ToolCall:
    if len(body) > MAX_CALL_CHARACTERS:
        return ToolCall("", {}, f"the call has {len(body)} characters, and {MAX_CALL_CHARACTERS} are allowed")
    try:
        call = json.loads(body)
        if isinstance(call, dict) and isinstance(call.get("arguments"), str):
            call["arguments"] = json.loads(call["arguments"])  # as OpenAI's interface has them
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"the call is not JSON: {str(error)[:200]}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", {}, 'a call is an object with "name" and "arguments"')
    name, arguments = call["name"], call.get("arguments", {})
    if name not in names:
        return ToolCall(name[:64], {}, f"no tool is called {name[:64]!r}; there are: {', '.join(names)}")
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, f'"arguments" of {name} is an object')
    return ToolCall(name, arguments)
