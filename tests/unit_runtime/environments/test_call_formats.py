"""Calls of Kimi, GLM, gpt-oss and Qwen3-Coder: what is read, and what is said of a call that cannot be made."""

from __future__ import annotations

import json
import time
from typing import Any

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
from orbit_runtime.model_info.calls.formats import FORMATS, format_of, openings

TOOLS = {
    "add": {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "x": {"type": "number"},
            "text": {"type": "string"},
            "ok": {"type": "boolean"},
            "list": {"type": "array"},
            "map": {"type": "object"},
            "none": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "either": {"type": ["string", "integer"]},
            "kind": {"enum": ["a", "b"]},
            "any": {"description": "of any type"},
        },
    },
    "now": {},
}
START, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def kimi(*calls: str) -> str:
    return f"{START}{''.join(f'<|tool_call_begin|>{call}<|tool_call_end|>' for call in calls)}{END}"


def kimi_call(of: str, arguments: str = "{}") -> str:
    return f"{of}<|tool_call_argument_begin|>{arguments}"


def glm(name: str, **values: str) -> str:
    given = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>{name}\n{given}</tool_call>"


def coder(name: str, **values: str) -> str:
    given = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"


def harmony(to: str, text: str = "{}") -> str:
    return f"<|channel|>commentary to={to} <|constrain|>json<|message|>{text}<|call|>"


def read(text: str, own: str = "") -> list[ToolCall]:
    return parse_tool_calls(text, TOOLS, FORMATS.get(own))


def test_calls_of_kimi_are_read_with_their_ids() -> None:
    text = (
        f"I see. {kimi(kimi_call('functions.add:3', ' {"a": 1} '), kimi_call(' now:4 '), kimi_call('now:5', ''))} more"
    )
    assert read(text) == [
        ToolCall("add", {"a": 1}, "", "functions.add:3"), ToolCall("now", {}, "", "now:4"),
        ToolCall("now", {}, "", "now:5"),
    ]  # fmt: skip
    assert text_before_calls(text) == "I see. "
    cut = text.partition("<|tool_call_end|>")[0]
    assert read(cut) == [ToolCall("add", {"a": 1}, "", "functions.add:3")]


VALUES: dict[str, tuple[str, Any]] = {
    "a": ("-3", -3),
    "x": ("2", 2),
    "text": ("5", "5"),
    "ok": ("true", True),
    "list": ('[1, {"é": null}]', [1, {"é": None}]),
    "map": ('{"a": "b\\n"}', {"a": "b\n"}),
    "none": ("null", None),
    "either": ("word", "word"),
    "kind": ("b", "b"),
}


@pytest.mark.parametrize("write", [glm, coder])
def test_values_are_what_the_schema_says(write: Any) -> None:
    given = {name: text for name, (text, _) in VALUES.items()}
    expected = {name: value for name, (_, value) in VALUES.items()}
    text = f"<think>hm</think>\n{write('add', **given)}{write('now')}"
    assert read(text) == [ToolCall("add", expected), ToolCall("now", {})]
    assert text_before_calls(text) == "<think>hm</think>\n"
    assert read(write("add", text=' "quoted"\n<b> ', either="7", x="1e3")) == [
        ToolCall("add", {"text": ' "quoted"\n<b> ', "either": 7, "x": 1000.0})
    ]
    assert read(write("add", a="2.0")) == [ToolCall("add", {"a": 2})]


def test_without_a_schema_glm_writes_json_or_text_and_qwen_text() -> None:
    assert read(glm("add", any="[1]", new="word")) == [ToolCall("add", {"any": [1], "new": "word"})]
    assert read(coder("add", any="[1]", new="word")) == [ToolCall("add", {"any": "[1]", "new": "word"})]
    assert parse_tool_calls(glm("add", a="1", text="1"), ["add"]) == [ToolCall("add", {"a": 1, "text": 1})]


def test_glm_may_leave_line_breaks_out_and_qwen_writes_truth_as_python_does() -> None:
    packed = "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    assert read(packed) == [ToolCall("add", {"a": 1})]
    assert read(coder("add", ok="True", none="None", text="True")) == [
        ToolCall("add", {"ok": True, "none": None, "text": "True"})
    ]


def test_a_call_of_gpt_oss_is_the_message_to_a_function() -> None:
    before = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary<|message|>so<|end|>"
    text = f"{before}<|start|>assistant{harmony('functions.add', json.dumps({'a': 1}))}"
    for each in (text, text.removesuffix("<|call|>")):
        assert read(each) == [ToolCall("add", {"a": 1})]
        assert text_before_calls(each) == before
    assert read("<|start|>assistant to=functions.now<|channel|>commentary json<|message|>") == [ToolCall("now", {})]
    assert read(harmony("functions.now").replace("commentary", "analysis")) == [ToolCall("now", {})]
    assert read("<|channel|>final<|message|>to=functions.add<|return|>") == []


def test_a_function_may_begin_an_answer_of_gpt_oss_and_no_other() -> None:
    text = " to=functions.now<|channel|>commentary json<|message|>{}"
    assert read(text, "harmony") == [ToolCall("now", {})]
    assert text_before_calls(text, FORMATS["harmony"]) == ""
    assert read(" to=functions.now is a word", "Hermes") == []
    assert " to=" in openings(FORMATS["harmony"])
    assert " to=" not in openings(None)


def test_the_call_decides_between_formats_of_the_same_tag_and_then_the_model() -> None:
    hermes = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    for own in ("", *FORMATS):
        for text in (hermes, glm("now"), coder("now")):
            assert read(text, own) == [ToolCall("now", {})], own
    said = {"GLM": "a call is <tool_call>NAME", "Qwen3-Coder": "a call is <function=NAME>", "": "the call is not JSON"}
    for own, error in said.items():
        (call,) = read("<tool_call>now(1, 2)</tool_call>", own)
        assert error in call.error


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (kimi(kimi_call("add")), "a call begins with functions.NAME:NUMBER, and this one with 'add'"),
        (kimi("functions.add:0"), "<|tool_call_argument_begin|> is missing between functions.add:0"),
        (kimi(kimi_call("functions.add:0", "{")), "the arguments of add are not JSON"),
        (kimi(kimi_call("functions.add:0", "[1]")), '"arguments" of add is an object'),
        (kimi(kimi_call("functions.sub:0")), "no tool is called 'sub'; there are: add, now"),
        (kimi(kimi_call("functions.add:0", "[" * 60_000)), "the arguments of add are not JSON"),
        (glm("sub"), "no tool is called 'sub'; there are: add, now"),
        (glm("add", a="x"), "the argument 'a' is integer in JSON, and not 'x'"),
        (glm("add", none="x"), "the argument 'none' is integer or null in JSON, and not 'x'"),
        (glm("add", a="1").replace("</arg_value>", ""), "an argument is <arg_key>…</arg_key> and <arg_value>"),
        (glm("add", a="1").replace("<arg_value>", ""), "an argument is <arg_key>…</arg_key> and <arg_value>"),
        ("<tool_call>add\n" + "<arg_key>a</arg_key><arg_value>1</arg_value>" * 2, "the argument 'a' is given twice"),
        ("<tool_call>add(1) <arg_key>a</arg_key>", "a call is <tool_call>NAME, then"),
        (coder("sub"), "no tool is called 'sub'; there are: add, now"),
        (coder("add", ok="yes"), "the argument 'ok' is boolean in JSON, and not 'yes'"),
        (coder("add", map="{'a': 1}"), "the argument 'map' is object in JSON, and not \"{'a': 1}\""),
        (coder("add", a="1").partition("</parameter>")[0], "a parameter is <parameter=NAME>, a line with its value"),
        ("<tool_call>x<function=add></function>", "a call is <function=NAME> in <tool_call>, and this begins with 'x"),
        ("<tool_call><function=now>" + "<parameter=a>\n1\n</parameter>" * 2, "the parameter 'a' is given twice"),
        (harmony("functions.sub"), "no tool is called 'sub'; there are: add, now"),
        (harmony("browser.search"), "a call is a message to=functions.NAME, and this one is to=browser.search"),
        (harmony("functions.add", "add(1)"), "the arguments of add are not JSON"),
        (harmony("functions.add").partition("<|message|>")[0], "<|message|> is missing between the head of the call"),
        (glm("add", text="x" * MAX_CALL_CHARACTERS), f"characters, and {MAX_CALL_CHARACTERS} are allowed"),
        (coder("add", text="x" * MAX_CALL_CHARACTERS), f"characters, and {MAX_CALL_CHARACTERS} are allowed"),
        (kimi(kimi_call("functions.add:0", "x" * MAX_CALL_CHARACTERS)), f"{MAX_CALL_CHARACTERS} are allowed"),
        (harmony("functions.add", "x" * MAX_CALL_CHARACTERS), f"{MAX_CALL_CHARACTERS} are allowed"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(text: str, error: str) -> None:
    (found,) = read(text)
    assert error in found.error
    assert len(found.error) < 400


def test_a_bad_call_of_kimi_keeps_its_id_so_that_its_error_has_a_place() -> None:
    (found,) = read(kimi(kimi_call("functions.add", "{")))
    assert found.id == "functions.add"
    (found,) = read(kimi(kimi_call("functions.add:0", "x" * MAX_CALL_CHARACTERS)))
    assert found.id == "functions.add:0"


@pytest.mark.parametrize(
    "text",
    [kimi(*[kimi_call("functions.now:0")] * 1000), glm("now") * 1000, coder("now") * 1000,
     f"<|start|>assistant{harmony('functions.now')}" * 1000],
)  # fmt: skip
def test_too_many_calls_are_answered_by_one_error(text: str) -> None:
    found = read(text)
    assert len(found) == MAX_CALLS + 1
    assert [each.error for each in found if each.error] == [f"more than {MAX_CALLS} calls at once"]


@pytest.mark.parametrize(
    "piece",
    [
        "<arg_key>",
        "</arg_key><arg_value>",
        "<arg_key>a</arg_key>\n",
        "<parameter=a>",
        "</function><function=a>\n",
        " \n",
        "<|tool_call_begin|>",
        "<|message|>",
        "<|channel|>commentary to=",
        "<|start|>",
        "<tool_call>",
    ],
)
def test_a_huge_call_takes_no_time(piece: str) -> None:
    for opening in ("<tool_call>add", "<tool_call><function=add>", START, "<|channel|>commentary to=functions.add"):
        started = time.perf_counter()
        read(opening + piece * (60_000 // len(piece)))
        assert time.perf_counter() - started < 2.0


PIECES = (
    "<tool_call>",
    "</tool_call>",
    "add",
    "now",
    "\n",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "a",
    "1",
    "<function=",
    "</function>",
    "<parameter=",
    "</parameter>",
    ">",
    "{",
    '"a"',
    ":",
    "}",
    START,
    END,
    "<|tool_call_begin|>",
    "functions.",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|start|>",
    "assistant",
    "<|channel|>",
    "analysis",
    "commentary",
    " to=",
    "<|constrain|>",
    "json",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "final",
)


@given(st.lists(st.sampled_from(PIECES), max_size=40), st.sampled_from(["", *FORMATS]))
def test_nothing_that_a_policy_writes_raises(pieces: list[str], own: str) -> None:
    text = "".join(pieces)
    for found in read(text, own):
        assert found.error or found.name in TOOLS
    assert text.startswith(text_before_calls(text, FORMATS.get(own)))
    for each in FORMATS.values():
        assert isinstance(each.message(text)["content"], str)


def test_a_template_says_its_format() -> None:
    assert format_of("{{ messages }}") is None
    assert format_of('{{ "<tool_call>" }} {"name": .., "arguments": ..}') is FORMATS["Hermes"]
    assert format_of("<tool_call><function=x><parameter=y>") is FORMATS["Qwen3-Coder"]
    assert format_of(START) is FORMATS["Kimi"]
