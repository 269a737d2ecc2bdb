"""Tool calls in a completion, in the formats of `model_info.calls`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from orbit_runtime.model_info.calls.format import CallFormat, NotACall, Schemas
from orbit_runtime.model_info.calls.formats import find_calls

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
    id: str = ""
    """The id that the policy gave it, in formats with ids."""


def parse_tool_calls(text: str, tools: Collection[str], own: CallFormat | None = None) -> list[ToolCall]:
    """All calls of a completion. Empty if it calls nothing, which makes it the last one of the episode.

    A call at the end of the text needs no closing tag: a stop string may have cut it off. The first call decides in
    which format the text is read.

    Args:
        tools: names of the available tools, or a mapping from them to schemas of their parameters
            (`parameter_schemas`). Formats that write no types read values by the schemas.
        own: the format in which the model's template writes calls, for texts that could be in several.
    """
    found = find_calls(text, own)
    if found is None:
        return []
    form, at = found
    schemas = tools if isinstance(tools, Mapping) else {}
    calls: list[ToolCall] = []
    for body in form.split(text[at:]):
        if len(calls) >= MAX_CALLS:
            calls.append(ToolCall("", {}, f"more than {MAX_CALLS} calls at once", form.call_id(body)))
            break
        calls.append(_parse(body, tools, form, schemas))
    return calls


def text_before_calls(text: str, own: CallFormat | None = None) -> str:
    """The text up to its first call; all of it if there is none."""
    found = find_calls(text, own)
    return text if found is None else text[: found[1]]


def parameter_schemas(tools: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Tool name → schema of its parameters, from schemas as chat templates take them."""
    return {str(tool["function"]["name"]): tool["function"].get("parameters") or {} for tool in tools}


def _parse(body: str, tools: Collection[str], form: CallFormat, schemas: Schemas) -> ToolCall:
    given = form.call_id(body)
    if len(body) > MAX_CALL_CHARACTERS:
        error = f"the call has {len(body)} characters, and {MAX_CALL_CHARACTERS} are allowed"
        return ToolCall("", {}, error, given)
    try:
        call = form.parse(body, schemas)
    except NotACall as error:
        return ToolCall("", {}, str(error), given)
    name, arguments = call.name, call.arguments
    if name not in tools:
        return ToolCall(name[:64], {}, f"no tool is called {name[:64]!r}; there are: {', '.join(tools)}", given)
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, f'"arguments" of {name} is an object', given)
    return ToolCall(name, arguments, "", given)
