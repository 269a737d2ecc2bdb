"""DeepSeek-V4's prompts and calls: Orbit's template and parser against the encoder and the parser that SGLang uses."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fakes.deepseek_v4_folder import write_deepseek_v4

from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.environments.tool_calls import parse_tool_calls
from orbit_runtime.spec.data import Chat
from orbit_runtime.workers.servers.process import PYTHON_VARIABLE

PROGRAM = Path(__file__).parent / "deepseek_v4_prompts.py"
NUMBER = 400
EFFORTS = (None, "low", "high", "max")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Finds pages, “quoted” or <not>.",
            "parameters": {
                "type": "object",
                "required": ["query"],
                "properties": {"query": {"type": "string"}, "most": {"type": "integer", "minimum": 1}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
WORDS = ("sum", "é", " two ", "\n", "{}", '"q"', "<b>", "`x`", "&amp;", "今日", "</tool_result>")
VALUES: tuple[Any, ...] = ("text", "a\n<b>&'\"", "", 3, 2.5, -1, True, None, [], [1, {"é": None}], {"k": ["v", False]})


def words(draw: random.Random) -> str:
    return "".join(draw.choices(WORDS, k=draw.randrange(1, 5)))


def assistant(draw: random.Random) -> dict[str, Any]:
    reasoning = {"reasoning_content": words(draw)} if draw.random() < 0.6 else {}
    return {"role": "assistant", "content": words(draw), **reasoning}


def calling(draw: random.Random, number: int) -> list[dict[str, Any]]:
    """An answer with calls, and their results in any order."""
    ids = [f"call_{number}_{index}" for index in range(draw.randrange(1, 4))]
    calls = []
    for each in ids:
        names = draw.sample(["query", "most", "é x"], k=draw.randrange(0, 4))
        arguments: Any = {name: draw.choice(VALUES) for name in names}
        if draw.random() < 0.5:
            arguments = json.dumps(arguments, ensure_ascii=draw.random() < 0.5)
        function = {"name": draw.choice(["search", "now"]), "arguments": arguments}
        calls.append({"id": each, "type": "function", "function": function})
    answer = assistant(draw) | {"tool_calls": calls}
    if draw.random() < 0.3:
        answer["content"] = draw.choice([None, ""])
    results = [{"role": "tool", "tool_call_id": each, "content": words(draw)} for each in ids]
    draw.shuffle(results)
    return [answer, *results]


def conversation(draw: random.Random) -> list[dict[str, Any]]:
    """What a request may hold: a system's message or none, several turns, calls, results, parts, messages in a row."""
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.5:
        messages.append({"role": "system", "content": draw.choice(["", words(draw)])})
    for number in range(draw.randrange(1, 5)):
        content: Any = words(draw)
        if draw.random() < 0.2:
            content = [{"type": "text", "text": words(draw)} for _ in range(draw.randrange(1, 3))]
        messages.append({"role": "user", "content": content})
        kind = draw.choice(["answered", "calling", "calling", "again", "system"])
        if kind == "calling":
            messages += calling(draw, number)
            messages += draw.choice([[], [assistant(draw)]])
        elif kind == "answered":
            messages.append(assistant(draw))
        elif kind == "system":
            messages.append({"role": draw.choice(["system", "developer"]), "content": words(draw)})
    if messages[-1]["role"] == "assistant" and draw.random() < 0.7:
        messages.append({"role": "user", "content": words(draw)})
    return messages


def bodies() -> list[dict[str, Any]]:
    draw = random.Random(7)
    made = []
    for index in range(NUMBER):
        body: dict[str, Any] = {"messages": conversation(draw), "thinking": bool(index % 2)}
        if draw.random() < 0.5:
            body["tools"] = TOOLS
        if effort := draw.choice(EFFORTS):
            body["reasoning_effort"] = effort
        # The encoder continues an answer only where nothing was called.
        is_plain = "tools" not in body and not any("tool_calls" in message for message in body["messages"])
        if is_plain and body["messages"][-1]["role"] == "assistant" and draw.random() < 0.5:
            body["continue_final_message"] = True
        made.append(body)
    return made


def calls_written(tokenizer: ChatTokenizer, bodies: list[dict[str, Any]]) -> list[str]:
    """The text of every answer with calls."""
    answers = [message for body in bodies for message in body["messages"] if message.get("tool_calls")]
    written = [tokenizer.render([answer], answer=False) for answer in answers]
    return [text.partition("</think>")[2].removesuffix("<｜end▁of▁sentence｜>") for text in written]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What was asked, and what SGLang made of it."""
    if not os.environ.get(PYTHON_VARIABLE):
        pytest.fail(f"{PYTHON_VARIABLE} is not set: run `make test-engines`")
    folder = write_deepseek_v4(tmp_path_factory.mktemp("deepseek-v4"))
    asked = {"tokenizer": str(folder / "tokenizer.json"), "tools": TOOLS, "bodies": bodies()}
    asked["texts"] = calls_written(ChatTokenizer(folder), asked["bodies"])
    (folder / "asked.json").write_text(json.dumps(asked))
    command = [os.environ[PYTHON_VARIABLE], str(PROGRAM), str(folder / "asked.json")]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr[-2000:]
    return {"folder": folder, **asked, **json.loads(answer.stdout.splitlines()[-1])}


def test_every_prompt_is_the_one_that_sglang_makes(seen: dict[str, Any]) -> None:
    tokenizers = {
        (thinking, effort): ChatTokenizer(
            seen["folder"],
            Chat(template_arguments={"thinking": thinking} | ({"reasoning_effort": effort} if effort else {})),
        )
        for thinking in (False, True)
        for effort in EFFORTS
    }
    for body, made in zip(seen["bodies"], seen["prompts"], strict=True):
        tokenizer = tokenizers[body["thinking"], body.get("reasoning_effort")]
        goes_on = "continue_final_message" in body
        text = tokenizer.render(body["messages"], body.get("tools", ()), answer=not goes_on)
        if goes_on:
            text = text.removesuffix("<｜end▁of▁sentence｜>")
        assert text == made["text"], body
        assert tokenizer.encode_text(text) == made["ids"], body


def test_the_conversations_hold_what_there_is(seen: dict[str, Any]) -> None:
    every = [body["messages"] for body in seen["bodies"]]
    kinds = {message["role"] for messages in every for message in messages}
    assert kinds == {"system", "developer", "user", "assistant", "tool"}
    assert sum("continue_final_message" in body for body in seen["bodies"]) > 5
    assert len(seen["texts"]) > 200


def test_every_call_is_read_as_sglang_reads_it(seen: dict[str, Any]) -> None:
    for text, calls in zip(seen["texts"], seen["calls"], strict=True):
        found = parse_tool_calls(text, ("search", "now"))
        assert [call.error for call in found] == [""] * len(found)
        assert [[call.name, dict(call.arguments)] for call in found] == calls, text
