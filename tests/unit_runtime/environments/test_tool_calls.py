"""Calls of tools in what a policy writes, however it writes them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit_runtime.environments.tool_calls import (
    MAX_CALL_CHARACTERS,
    MAX_CALLS,
    ToolCall,
    parse_tool_calls,
    text_before_calls,
)

NAMES = ("add", "search")


def call(name: object = "add", **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def dsml(*calls: str) -> str:
    return "<｜DSML｜tool_calls>\n" + "".join(f"<｜DSML｜invoke {each}\n" for each in calls) + "</｜DSML｜tool_calls>"


def parameter(name: str, value: str, *, is_text: bool) -> str:
    return f'<｜DSML｜parameter name="{name}" string="{str(is_text).lower()}">{value}</｜DSML｜parameter>\n'


END = "</｜DSML｜invoke>"


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


def test_calls_of_deepseek_v4_are_read_in_their_order() -> None:
    value = "a\n<tool_call>{}</tool_call> "
    first = f'name="add">\n{parameter("a", "[1, null]", is_text=False)}{parameter("b", value, is_text=True)}{END}'
    text = f"I see.\n\n{dsml(first, f'name="search">{chr(10)}{END}', 'name="add"/>')} more"
    expected = [ToolCall("add", {"a": [1, None], "b": value}), ToolCall("search", {}), ToolCall("add", {})]
    assert parse_tool_calls(text, NAMES) == expected
    assert text_before_calls(text) == "I see.\n\n"


def test_the_end_of_a_call_of_deepseek_v4_may_be_cut_off() -> None:
    text = dsml(f'name="add">\n{parameter("a", "1", is_text=False)}').removesuffix("</｜DSML｜tool_calls>")
    assert parse_tool_calls(text, NAMES) == [ToolCall("add", {"a": 1})]


def test_the_first_call_decides_the_form() -> None:
    assert parse_tool_calls(call(a="<｜DSML｜tool_calls>"), NAMES) == [ToolCall("add", {"a": "<｜DSML｜tool_calls>"})]
    assert text_before_calls("a<b") == "a<b"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("add>", 'a call begins with <｜DSML｜invoke name="…">'),
        (f'name="sub">{END}', "no tool is called 'sub'; there are: add, search"),
        (
            f'name="add">{parameter("a", "x", is_text=False)}{END}',
            "the parameter 'a' has string=\"false\" and is not JSON",
        ),
        (f'name="add">{parameter("a", "x", is_text=True) * 2}{END}', "the parameter 'a' is given twice"),
        ('name="add">{"a": 1}', 'a parameter is <｜DSML｜parameter name="…"'),
        ('name="add"><｜DSML｜parameter name="a" string="true">x', 'a parameter is <｜DSML｜parameter name="…"'),
        (f'name="add">{parameter("a", "x" * MAX_CALL_CHARACTERS, is_text=True)}', "characters are allowed"),
    ],
)
def test_what_is_wrong_with_a_call_of_deepseek_v4_is_said(body: str, error: str) -> None:
    (found,) = parse_tool_calls(dsml(body), NAMES)
    assert error.replace("characters are", f"characters, and {MAX_CALL_CHARACTERS} are") in found.error
    assert len(found.error) < 400


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
    assert len(parse_tool_calls(dsml(*[f'name="add">{END}'] * 1000), NAMES)) == MAX_CALLS + 1


@given(st.text(alphabet='<>/tool_callnmeargus"{}[]:, 1\\', max_size=200), st.booleans())
def test_nothing_that_a_policy_writes_raises(text: str, is_in_tags: bool) -> None:
    for found in parse_tool_calls(f"<tool_call>{text}</tool_call>" if is_in_tags else text, NAMES):
        assert found.error or found.name in NAMES


PIECES = (
    "<｜DSML｜", "</｜DSML｜", "tool_calls>", "invoke", "parameter", ' name="add"', ' string="', "true", 'false"',
    ">", "/", "\n", "1", "x",
)  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=40))
def test_nothing_that_deepseek_v4_writes_raises(pieces: list[str]) -> None:
    for found in parse_tool_calls("<｜DSML｜tool_calls>" + "".join(pieces), NAMES):
        assert found.error or found.name in NAMES
