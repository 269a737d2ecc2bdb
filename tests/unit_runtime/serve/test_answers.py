"""What of a text is sent when, and calls of tools in OpenAI's form."""

from __future__ import annotations

import json
from array import array

import pytest

from orbit_runtime.serve.answers import ChoicePart, ResponseForm, SentText
from orbit_runtime.types import FLOATS, TOKENS, FinishReason

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


class Letters:
    """A tokenizer of characters."""

    eos_ids = (0,)

    def __init__(self, call_format: str = "") -> None:
        self.call_format = call_format

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))

    def text_of(self, token_id: int) -> str:
        return chr(token_id)


def part(text: str, reason: FinishReason | None = "stop") -> ChoicePart:
    ids = array(TOKENS, map(ord, text))
    return ChoicePart(0, ids, array(FLOATS, [-1.0] * len(ids)), reason, text)


class Bytes:
    """A tokenizer of bytes."""

    eos_ids = ()
    longest = 0

    def decode(self, token_ids: list[int]) -> str:
        self.longest = max(self.longest, len(token_ids))
        return bytes(token_ids).decode(errors="replace")


def form(*tools: str, own: str = "") -> ResponseForm:
    return ResponseForm(True, "policy", Letters(own), "policy@0", False, tools)  # type: ignore[arg-type]


@pytest.mark.parametrize("stops", [(), ("END",), ("EE", "END")])
@pytest.mark.parametrize("final", ["one EN two", "one", "EEN", "déjà"])
def test_pieces_make_the_final_text_and_never_more(stops: tuple[str, ...], final: str) -> None:
    sent = SentText(stops)
    pieces = [sent.take(character) for character in final]
    assert "".join([*pieces, sent.rest(final)]) == final


def test_the_beginning_of_a_stop_is_held_back() -> None:
    sent = SentText(("END",))
    assert sent.take("one E") == "one "
    assert sent.take("N") == ""
    assert sent.rest("one ") == ""


def test_a_character_of_which_bytes_are_missing_is_held_back() -> None:
    sent = SentText()
    assert [sent.decode(Bytes(), [byte]) for byte in "caf€!".encode()] == ["c", "a", "f", "", "", "€", "!"]


def test_what_never_becomes_a_character_is_sent_as_what_it_is_and_costs_no_more_and_more() -> None:
    tokenizer, sent = Bytes(), SentText()
    text = "".join(sent.decode(tokenizer, [0xFF]) for _ in range(1000))
    assert text == "\ufffd" * len(text)
    assert len(text) > 950
    assert tokenizer.longest <= 64


def test_a_call_of_a_tool_comes_back_as_one() -> None:
    whole = form("add").whole([part(f"let me see {CALL}")], prompt_tokens=3)
    (choice,) = whole["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "let me see")
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1})


def test_a_call_of_deepseek_v4_comes_back_as_one_too() -> None:
    parameter = '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>'
    calls = f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n{parameter}\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    asked = form("add")
    (choice,) = asked.whole([part(f"let me see\n\n{calls}")], prompt_tokens=3)["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "let me see")
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert SentText(asked.held_back).take(f"so {calls}") == "so "


@pytest.mark.parametrize("text", [f"{CALL[:-13]}x", CALL.replace("add", "sub")])
def test_a_call_that_cannot_be_made_stays_text(text: str) -> None:
    (choice,) = form("add").whole([part(text)], prompt_tokens=3)["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", text)


KIMI = (
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:7<|tool_call_argument_begin|>{"a": 1}'
    "<|tool_call_end|><|tool_calls_section_end|>"
)
THOUGHT = "<|channel|>analysis<|message|>hm<|end|>"
FORMS = {
    "Hermes": ("so ", CALL),
    "Kimi": ("so ", KIMI),
    "GLM": ("so ", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
    "Qwen3-Coder": ("so ", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"),
    "harmony": (
        THOUGHT,
        '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}',
    ),
}
SCHEMA = {"add": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@pytest.mark.parametrize("own", FORMS)
def test_a_streamed_call_of_any_family_is_no_part_of_the_text_and_values_are_of_the_schema(own: str) -> None:
    asked = ResponseForm(True, "policy", Letters(own), "policy@0", False, SCHEMA)  # type: ignore[arg-type]
    before, call = FORMS[own]
    text, sent, pieces = before + call, SentText(asked.held_back), []
    for size in range(1, len(text) + 1):
        pieces += asked.piece(part(text[:size], None), sent)
    pieces += asked.piece(part(text), sent)
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert "".join(delta.get("content") or "" for delta in deltas) == before
    (made,) = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert made["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert made["id"] == "functions.add:7" if own == "Kimi" else made["id"].startswith("call_")


def test_an_answer_of_gpt_oss_that_begins_with_a_call_has_no_text() -> None:
    text = " to=functions.add<|channel|>commentary json<|message|>{}"
    asked = form("add", own="harmony")
    (choice,) = asked.whole([part(text)], prompt_tokens=3)["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert SentText(asked.held_back).take(text) == ""


def test_a_streamed_call_is_no_part_of_the_text() -> None:
    asked = form("add")
    text, sent, pieces = f"so {CALL}", SentText(asked.held_back), []
    for size in range(1, len(text) + 1):
        pieces += asked.piece(part(text[:size], None), sent)
    pieces += asked.piece(part(text), sent)
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert "".join(delta.get("content") or "" for delta in deltas) == "so "
    assert [call["function"]["name"] for delta in deltas for call in delta.get("tool_calls", ())] == ["add"]
    assert pieces[-1]["choices"][0]["finish_reason"] == "tool_calls"
