"""Calls as gpt-oss writes them, in OpenAI's harmony format: a message to a function.

    <|channel|>analysis<|message|>I add.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>

(without the line break). An answer is several messages, each with a channel; the prompt ends with `<|start|>assistant`.
The function may also stand before the channel, as chat templates write it. `<|call|>` ends the model's turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orbit_runtime.model_info.calls.format import CallFormat, NotACall, ParsedCall, Schemas, load_arguments

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
OPENINGS = (
    f"{START}assistant{CHANNEL}commentary to=", f"{START}assistant{CHANNEL}analysis to=", f"{START}assistant to=",
    f"{CHANNEL}commentary to=", f"{CHANNEL}analysis to=",
)  # fmt: skip
_ENDS = re.compile("|".join(map(re.escape, (END, CALL, RETURN))))
_RECIPIENT = re.compile(r"\bto=([^\s<]*)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w*)")


@dataclass(frozen=True, slots=True)
class _Message:
    channel: str
    recipient: str
    """Empty if it is for the user."""
    text: str


def split(text: str) -> list[str]:
    """Messages to functions, each with its head."""
    return [piece for piece in text.split(START) if _RECIPIENT.search(piece.partition(MESSAGE)[0])]


def parse(body: str, schemas: Schemas) -> ParsedCall:
    """
    Raises:
        NotACall: it has no text, or one that is not JSON.
    """
    head, separator, text = body.partition(MESSAGE)
    recipient = _recipient(head)
    if not separator:
        raise NotACall(f"{MESSAGE} is missing between the head of the call, {head.strip()[:80]!r}, and its arguments")
    if not recipient.startswith("functions."):
        raise NotACall(f"a call is a message to=functions.NAME, and this one is to={recipient[:64]}")
    name = recipient.removeprefix("functions.")
    return ParsedCall(name, load_arguments(_ENDS.split(text, 1)[0], name))


def message(text: str) -> Mapping[str, Any]:
    """The text's channels as the template's fields: it writes the tokens of channels itself, and refuses them in texts.

    It takes one call of a message, and writes the content beside it as reasoning.
    """
    if MESSAGE not in text and CHANNEL not in text:
        return {"content": text}
    told = [*_messages(text)]
    texts = {channel: [each.text for each in told if each.channel == channel] for channel in ("analysis", "final")}
    if texts["final"]:
        thinking = {"thinking": "\n".join(texts["analysis"])} if texts["analysis"] else {}
        return {"content": "\n".join(texts["final"]), **thinking}
    content = "\n".join(each.text for each in told if not each.recipient)
    called = [each.recipient.removeprefix("functions.") for each in told if each.recipient]
    if not called:
        return {"content": content}
    function = {"name": called[-1] or "unknown", "arguments": {}}
    return {"content": content, "tool_calls": [{"type": "function", "function": function}]}


def _messages(text: str) -> Iterator[_Message]:
    for piece in text.split(START):
        head, separator, rest = piece.partition(MESSAGE)
        if separator or _RECIPIENT.search(head):
            channel = _CHANNEL.search(head)
            yield _Message(channel[1] if channel else "", _recipient(head), _ENDS.split(rest, 1)[0])


def _recipient(head: str) -> str:
    found = _RECIPIENT.search(head)
    return found[1] if found else ""


FORMAT = CallFormat(
    "harmony", OPENINGS, split, parse, signs=(CHANNEL, MESSAGE, CALL), first=" to=", message=message,
    markers=(START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN), ends=(CALL,),
)  # fmt: skip
