"""Calls as Kimi-K2 and later write them: special tokens around an id and JSON.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>
    <|tool_calls_section_end|>

The id holds the tool's name, and a number that counts the calls of a conversation. The template names a result by it.
"""

from __future__ import annotations

import re

from orbit_runtime.model_info.calls.format import CallFormat, NotACall, ParsedCall, Schemas, load_arguments

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?:functions\.)?([\w.\-]+):\d+")


def split(text: str) -> list[str]:
    """Each call of the section with which this text begins."""
    section = text.removeprefix(OPEN).partition(CLOSE)[0]
    return [piece.partition(_CALL_END)[0] for piece in section.split(_CALL)[1:]]


def parse(body: str, schemas: Schemas) -> ParsedCall:
    """
    Raises:
        NotACall: its id is none, or its arguments are not JSON.
    """
    head, separator, arguments = body.partition(_ARGUMENTS)
    if (named := _ID.fullmatch(head.strip())) is None:
        raise NotACall(f"a call begins with functions.NAME:NUMBER, and this one with {head.strip()[:80]!r}")
    if not separator:
        raise NotACall(f"{_ARGUMENTS} is missing between {named[0][:80]} and its arguments")
    return ParsedCall(named[1], load_arguments(arguments, named[1]))


def call_id(body: str) -> str:
    """The id as it was written, well formed or not."""
    return body.partition(_ARGUMENTS)[0].strip()[:128]


FORMAT = CallFormat(
    "Kimi", (OPEN,), split, parse, signs=(OPEN,), call_id=call_id, markers=(OPEN, CLOSE, _CALL, _ARGUMENTS, _CALL_END)
)
