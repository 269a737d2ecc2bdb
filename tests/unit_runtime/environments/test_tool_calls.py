"""Calls of tools in what a policy writes, however it writes them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit_runtime.environments.tool_calls import MAX_CALL_CHARACTERS, MAX_CALLS, ToolCall, parse_tool_calls

NAMES = ("add", "search")


def call(name: object = "add", **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_calls_are_read_in_their_order_and_text_around_them_is_not() -> None:
    text = f"<think>hm</think>I add.{call(a=1)}\n{call('search', query='x')}<|im_end|>"
    assert parse_tool_calls(text, NAMES) == [ToolCall("add", {"a": 1}), ToolCall("search", {"query": "x"})]


def test_an_answer_without_calls_calls_nothing() -> None:
    assert parse_tool_calls("46 </tool_call> <tool_response>", NAMES) == []


def test_arguments_may_be_json_in_text_and_the_closing_tag_cut_off() -> None:
    assert parse_tool_calls('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', NAMES) == [
        ToolCall("add", {"a": 1})
    ]
    assert parse_tool_calls('<tool_call>{"name": "add"}</tool_call>', NAMES) == [ToolCall("add", {})]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>add(1, 2)</tool_call>", "the call is not JSON: Expecting value"),
        ("<tool_call></tool_call>", "the call is not JSON"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1', "the call is not JSON"),
        ('<tool_call>{"name": "add", "arguments": "a"}', "the call is not JSON"),
        ("<tool_call>[1]</tool_call>", 'a call is an object with "name" and "arguments"'),
        ('<tool_call>{"arguments": {}}</tool_call>', 'a call is an object with "name" and "arguments"'),
        (call("sub"), "no tool is called 'sub'; there are: add, search"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', '"arguments" of add is an object'),
        (call(a="x" * MAX_CALL_CHARACTERS), f"characters, and {MAX_CALL_CHARACTERS} are allowed"),
        ("<tool_call>" + "[" * 60_000, "the call is not JSON"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(text: str, error: str) -> None:
    (found,) = parse_tool_calls(text, NAMES)
    assert error in found.error
    assert len(found.error) < 400


def test_too_many_calls_are_answered_by_one_error() -> None:
    found = parse_tool_calls(call(a=1) * 1000, NAMES)
    assert len(found) == MAX_CALLS + 1
    assert [each.error for each in found if each.error] == [f"more than {MAX_CALLS} calls at once"]


@given(st.text(alphabet='<>/tool_callnmeargus"{}[]:, 1\\', max_size=200), st.booleans())
def test_nothing_that_a_policy_writes_raises(text: str, is_in_tags: bool) -> None:
    for found in parse_tool_calls(f"<tool_call>{text}</tool_call>" if is_in_tags else text, NAMES):
        assert found.error or found.name in NAMES
