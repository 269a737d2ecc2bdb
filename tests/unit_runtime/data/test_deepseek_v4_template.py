"""DeepSeek-V4's prompts, in the texts of its own encoder; tests/engines compares many more with the encoder itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.deepseek_v4_folder import write_deepseek_v4

from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.data.demonstrations import encode_demonstrations, read_demonstration
from orbit_runtime.errors import DataError, ModelError
from orbit_runtime.spec.data import Chat
from orbit_runtime.types import Prompt

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
THINKS = {"thinking": True, "reasoning_effort": "low"}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
TOOLS = """

## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{"name": "find", "description": "", "parameters": {"type": "object", "properties": {}}}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
CALLS = """

<｜DSML｜tool_calls>
<｜DSML｜invoke name="find">
<｜DSML｜parameter name="n" string="false">[1, {"é": null}]</｜DSML｜parameter>
<｜DSML｜parameter name="s" string="true">a
<b></｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="find">
</｜DSML｜invoke>
</｜DSML｜tool_calls>"""


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def called(*arguments: Any) -> dict[str, Any]:
    functions = [{"name": "find", "arguments": each} for each in arguments]
    return {"tool_calls": [{"id": f"i{index}", "function": each} for index, each in enumerate(functions)]}


SYSTEM = {"role": "system", "content": "Sys"}
ARGUMENTS = {"n": [1, {"é": None}], "s": "a\n<b>"}
RESULTS = [
    {"role": "tool", "tool_call_id": "i1", "content": "1"},
    {"role": "tool", "tool_call_id": "i0", "content": "0"},
]


@pytest.fixture
def built(tmp_path: Path) -> Callable[..., ChatTokenizer]:
    folder = write_deepseek_v4(tmp_path / "model")
    return lambda **arguments: ChatTokenizer(folder, Chat(template_arguments=arguments))


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([user("Hi")], "<｜User｜>Hi"),
        ([SYSTEM, user(" Hi ")], "Sys<｜User｜> Hi "),
        ([{"role": "system", "content": ""}, user("1"), user("2"), SYSTEM], "Sys<｜User｜>1\n\n2"),
        ([user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])], "<｜User｜>a\n\nb"),
        (
            [user("1"), assistant("2", reasoning_content="R"), user("3")],
            f"<｜User｜>1<｜Assistant｜></think>2{EOS}<｜User｜>3",
        ),
        (
            [user("1"), assistant(None, **called(ARGUMENTS, {})), *RESULTS, user("then")],
            f"<｜User｜>1<｜Assistant｜></think>{CALLS}{EOS}"
            "<｜User｜><tool_result>0</tool_result>\n\n<tool_result>1</tool_result>\n\nthen",
        ),
    ],
)
def test_without_thinking_a_prompt_is_what_the_encoder_writes(
    built: Callable[..., ChatTokenizer], messages: list[dict[str, Any]], text: str
) -> None:
    assert built().render(messages) == f"{BOS}{text}<｜Assistant｜></think>"


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([SYSTEM, user("Hi")], "Sys<｜User｜>Hi"),
        (
            [user("1"), assistant("2", reasoning_content="R"), user("3")],
            f"<｜User｜>1<｜Assistant｜></think>2{EOS}<｜User｜>3",
        ),
        ([user("1"), assistant("2", reasoning_content="R")], f"<｜User｜>1<｜Assistant｜></think>2{EOS}"),
    ],
)
def test_with_thinking_earlier_reasoning_is_left_out(
    built: Callable[..., ChatTokenizer], messages: list[dict[str, Any]], text: str
) -> None:
    assert built(**THINKS).render(messages) == f"{BOS}{text}<｜Assistant｜><think>"


def test_with_tools_all_reasoning_stays(built: Callable[..., ChatTokenizer]) -> None:
    messages = [user("1"), assistant("c", reasoning_content="R", **called(ARGUMENTS, {})), *RESULTS, assistant("2"),
                user("3")]  # fmt: skip
    assert built(**THINKS).render(messages, [TOOL]) == (
        f"{BOS}{TOOLS}<｜User｜>1<｜Assistant｜><think>R</think>c{CALLS}{EOS}"
        "<｜User｜><tool_result>0</tool_result>\n\n<tool_result>1</tool_result>"
        f"<｜Assistant｜><think></think>2{EOS}<｜User｜>3<｜Assistant｜><think>"
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"thinking": True}, "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"),
        ({"enable_thinking": True, "reasoning_effort": "high"}, "Reasoning Effort: Absolute maximum with no shortcuts"),
        ({"thinking": True, "reasoning_effort": "max"}, "Reasoning Effort: Beyond maximum — exhaustive, relentless"),
        ({"thinking": True, "reasoning_effort": "low"}, "Sys"),
        ({"thinking": False, "reasoning_effort": "max"}, "Sys"),
    ],
)
def test_an_effort_is_a_text_before_everything_else(
    built: Callable[..., ChatTokenizer], arguments: dict[str, Any], line: str
) -> None:
    assert built(**arguments).render([SYSTEM, user("1")]).startswith(BOS + line)


def test_an_answer_in_one_text_is_read_as_it_was_sampled(built: Callable[..., ChatTokenizer]) -> None:
    """Prompt and completion, joined, are the conversation's text; `<think>` at its beginning is the prompt's."""
    tokenizer = built(**THINKS)
    prompt = tokenizer.render([user("1")])
    for content in ("R\n</think>2", "<think>R\n</think>2"):
        whole = tokenizer.render([user("1"), assistant(content)], answer=False)
        assert whole == f"{prompt}R\n</think>2{EOS}"
    assert built().render([user("1"), assistant("R</think>2")], answer=False).endswith(f"<｜Assistant｜></think>2{EOS}")


def test_arguments_of_calls_may_be_json_in_text(built: Callable[..., ChatTokenizer]) -> None:
    tokenizer = built()
    assert tokenizer.render([user("1"), assistant("", **called(json.dumps(ARGUMENTS), "{}"))], answer=False) == (
        tokenizer.render([user("1"), assistant("", **called(ARGUMENTS, {}))], answer=False)
    )
    kept = tokenizer.render([user("1"), assistant("", **called("no json"))], answer=False)
    assert '<｜DSML｜parameter name="arguments" string="true">no json</｜DSML｜parameter>' in kept


def test_it_writes_calls(built: Callable[..., ChatTokenizer]) -> None:
    assert built().writes_calls
    assert built(**THINKS).writes_calls


@pytest.mark.parametrize(("arguments", "opening"), [({}, "</think>"), (THINKS, "<think>")])
def test_what_follows_a_sampled_answer_is_added_to_it(
    built: Callable[..., ChatTokenizer], arguments: dict[str, Any], opening: str
) -> None:
    """With thinking the sampled reasoning stays before it, though the encoder would leave it out."""
    tokenizer = built(**arguments)
    sampled = assistant("R</think>call\n\n<｜DSML｜tool_calls>")
    results = [{"role": "tool", "name": "find", "content": "0"}, {"role": "tool", "name": "find", "content": "1"}]
    following = "<｜User｜><tool_result>0</tool_result>\n\n<tool_result>1</tool_result><｜Assistant｜>" + opening
    (end,) = tokenizer.encode_text(EOS)
    for tools in ([], [TOOL]):
        ids = tokenizer.encode_continuation([user("1"), sampled, *results], 1, end, tools=tools)
        assert tokenizer.decode_all(ids) == following
    ids = tokenizer.encode_continuation([user("1"), sampled, user("more")], 1, None)
    assert tokenizer.decode_all(ids) == f"{EOS}<｜User｜>more<｜Assistant｜>{opening}"


def test_a_later_message_of_the_system_cannot_follow_an_answer(built: Callable[..., ChatTokenizer]) -> None:
    """The encoder writes it before everything else."""
    with pytest.raises(ModelError, match="leaves out a message of role 'system'"):
        built().encode_continuation([user("1"), assistant("2"), SYSTEM, user("3")], 1, None)


@pytest.mark.parametrize(
    ("arguments", "messages", "error"),
    [
        ({"thinking": True, "reasoning_effort": "most"}, [user("1")], "reasoning_effort is one of low, high, max"),
        ({}, [user("1"), {"role": "critic", "content": "2"}], "a message has the role critic; there are system, user"),
        ({}, [user([{"type": "image_url"}])], "a part of a message is not text but image_url"),
    ],
)
def test_what_it_cannot_write_is_said(
    built: Callable[..., ChatTokenizer], arguments: dict[str, Any], messages: list[dict[str, Any]], error: str
) -> None:
    with pytest.raises(ModelError, match=error):
        built(**arguments).render(messages)


def test_demonstrations_of_several_answers_with_reasoning_need_it_to_stay(built: Callable[..., ChatTokenizer]) -> None:
    messages = [user("1"), assistant("2", reasoning_content="R"), user("3"), assistant("4", reasoning_content="S")]
    asked = [read_demonstration(Prompt("row", 0, tuple(messages)), completion_field=None)]
    with pytest.raises(DataError, match="row"):
        encode_demonstrations(asked, built(**THINKS), max_tokens=512, place_of=str)
    tokenizer = built(**THINKS, drop_thinking=False)
    (kept,) = encode_demonstrations(asked, tokenizer, max_tokens=512, place_of=str)
    assert tokenizer.decode_all(kept.token_ids_T) == (
        f"{BOS}<｜User｜>1<｜Assistant｜><think>R</think>2{EOS}<｜User｜>3<｜Assistant｜><think>S</think>4{EOS}"
    )


def test_a_template_in_the_folder_wins(tmp_path: Path) -> None:
    folder = write_deepseek_v4(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert ChatTokenizer(folder).render([user("Hi")]) == "Hi!"


def test_another_family_needs_a_template(tmp_path: Path) -> None:
    folder = write_deepseek_v4(tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"model_type": "llama"}))
    with pytest.raises(ModelError, match="no chat template"):
        ChatTokenizer(folder)
