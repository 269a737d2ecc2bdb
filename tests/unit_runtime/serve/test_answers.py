"""What of a text is sent when, and calls of tools in OpenAI's form."""

from __future__ import annotations

import json

import pytest

from orbit_runtime.serve.answers import Form, Sent
from orbit_runtime.types import Completion

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


class Letters:
    """A tokenizer of characters."""

    eos_ids = (0,)

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


def completion(text: str, reason: str = "stop") -> Completion:
    ids = list(map(ord, text))
    return Completion(0, ids, [-1.0] * len(ids), [0] * len(ids), reason, text)  # type: ignore[arg-type]


def form(*tools: str) -> Form:
    return Form(True, "policy", Letters(), "policy@0", False, tools)  # type: ignore[arg-type]


@pytest.mark.parametrize("stops", [(), ("END",), ("EE", "END")])
@pytest.mark.parametrize("final", ["one EN two", "one", "EEN", "déjà"])
def test_pieces_make_the_final_text_and_never_more(stops: tuple[str, ...], final: str) -> None:
    sent, pieces = Sent(stops), []
    for size in range(len(final)):
        pieces.append(sent.take(final[:size], is_done=False))
    pieces.append(sent.take(final, is_done=True))
    assert "".join(pieces) == final


def test_the_beginning_of_a_stop_is_held_back() -> None:
    sent = Sent(("END",))
    assert sent.take("one E", is_done=False) == "one "
    assert sent.take("one EN", is_done=False) == ""
    assert sent.take("one ", is_done=True) == ""


def test_a_character_of_which_bytes_are_missing_is_held_back() -> None:
    sent = Sent()
    assert sent.take("caf\ufffd", is_done=False) == "caf"
    assert sent.take("café", is_done=False) == "é"


def test_a_call_of_a_tool_comes_back_as_one() -> None:
    whole = form("add").whole([completion(f"let me see {CALL}")], prompt_tokens=3)
    (choice,) = whole["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "let me see")
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1})


@pytest.mark.parametrize("text", [f"{CALL[:-13]}x", CALL.replace("add", "sub")])
def test_a_call_that_cannot_be_made_stays_text(text: str) -> None:
    (choice,) = form("add").whole([completion(text)], prompt_tokens=3)["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", text)


def test_a_streamed_call_is_no_part_of_the_text() -> None:
    asked = form("add")
    text, sent, pieces = f"so {CALL}", Sent(asked.held_back), []
    for size in range(1, len(text) + 1):
        pieces += asked.piece(0, completion(text[:size]), sent, is_done=False)
    pieces += asked.piece(0, completion(text), sent, is_done=True)
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert "".join(delta.get("content") or "" for delta in deltas) == "so "
    assert [call["function"]["name"] for delta in deltas for call in delta.get("tool_calls", ())] == ["add"]
    assert pieces[-1]["choices"][0]["finish_reason"] == "tool_calls"
