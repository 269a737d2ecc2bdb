"""Tool calls in a completion: `<tool_call>{"name": …}</tool_call>`, as Hermes and Qwen write them, or DSML.

Belongs here: text to calls, and errors in them worded for the policy. Does not belong here: the syntax of DSML
(`dsml`), making the calls (`workers`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from orbit_runtime.environments import dsml

OPEN, CLOSE = "<tool_call>", "</tool_call>"
OPENINGS = (OPEN, dsml.OPEN)
"""Either begins the part of a text that calls tools."""
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

    A call at the end of the text needs no closing tag: a stop string may have cut it off. The first call decides in
    which of the two forms the text is read.

    Args:
        names: names of the available tools.
    """
    before = text_before_calls(text)
    is_dsml = text.startswith(dsml.OPEN, len(before))
    calls: list[ToolCall] = []
    for body in dsml.split(text[len(before) :]) if is_dsml else _split(text):
        if len(calls) >= MAX_CALLS:
            calls.append(ToolCall("", {}, f"more than {MAX_CALLS} calls at once"))
            break
        calls.append(_parse(body, names, is_dsml=is_dsml))
    return calls


def text_before_calls(text: str) -> str:
    """The text up to its first call; all of it if there is none."""
    return text[: min((at for opening in OPENINGS if (at := text.find(opening)) >= 0), default=len(text))]


def write_tool_call(name: str, arguments: Any) -> str:
    """Writes a call in the form of Hermes, which `parse_tool_calls` reads."""
    return f"{OPEN}\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n{CLOSE}"


def _split(text: str) -> list[str]:
    return [piece.partition(CLOSE)[0] for piece in text.split(OPEN)[1:]]


def _parse(body: str, names: Collection[str], *, is_dsml: bool) -> ToolCall:
    if len(body) > MAX_CALL_CHARACTERS:
        return ToolCall("", {}, f"the call has {len(body)} characters, and {MAX_CALL_CHARACTERS} are allowed")
    try:
        call = dsml.parse(body) if is_dsml else _parse_json(body)
    except dsml.NotDSML as error:
        return ToolCall("", {}, str(error))
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


def _parse_json(body: str) -> Any:
    call = json.loads(body)
    if isinstance(call, dict) and isinstance(call.get("arguments"), str):
        call["arguments"] = json.loads(call["arguments"])  # as OpenAI's interface has them
    return call
