"""Messages with calls of tools, as clients send them back, into what chat templates take."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orbit_runtime.environments.tool_calls import parse_tool_calls
from orbit_runtime.serve.requests import APIError, ChatBody, parse_body

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "1+2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "3"},
]


def body(**fields: Any) -> ChatBody:
    return parse_body(ChatBody, json.dumps({"model": "policy", "messages": MESSAGES, **fields}).encode())


def test_arguments_are_objects_for_a_template_that_writes_calls() -> None:
    _, called, answered = body(tools=TOOLS).conversation(writes_calls=True)
    assert called["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert (called["content"], answered) == ("", MESSAGES[2])


def test_calls_become_text_that_is_read_back_for_a_template_that_writes_none() -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "so", "tool_calls": [CALL, CALL]}]
    _, called, _, both = body(messages=messages).conversation(writes_calls=False)
    assert "tool_calls" not in called
    for message, count in ((called, 1), (both, 2)):
        found = parse_tool_calls(message["content"], ["add"])
        assert [(call.name, call.arguments, call.error) for call in found] == [("add", {"a": 1, "b": 2}, "")] * count
    assert both["content"].startswith("so\n<tool_call>")


def test_with_tool_choice_none_there_are_no_tools() -> None:
    assert body(tools=TOOLS, tool_choice="auto").tool_schemas() == {"add": {"type": "object"}}
    asked = body(tools=TOOLS, tool_choice="none")
    assert (asked.offered, asked.tool_schemas()) == ([], {})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}, 3])
def test_other_choices_are_refused_by_name(choice: object) -> None:
    with pytest.raises(APIError) as caught:
        body(tools=TOOLS, tool_choice=choice)
    assert (caught.value.status, caught.value.param) == (400, "tool_choice")


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("max_token", "max_token: this server has no such field; did you mean `max_tokens`?"),
        ("beams", "beams: this server has no such field"),
    ],
)
def test_a_field_that_is_none_is_told_with_the_one_that_was_meant(field: str, said: str) -> None:
    with pytest.raises(APIError) as caught:
        body(**{field: 4})
    assert (caught.value.status, caught.value.param, caught.value.message) == (400, field, said)


@pytest.mark.parametrize(
    "call", [3, {}, {"function": {"name": "add", "arguments": "{"}}, {"function": {"name": 3, "arguments": "{}"}},
             {"function": {"name": "add", "arguments": "[1]"}}],
)  # fmt: skip
def test_a_call_that_is_none_is_refused_and_not_shown_to_the_model(call: object) -> None:
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(APIError, match=r"messages\[0\]: a tool call"):
        body(messages=messages).conversation(writes_calls=True)
