"""Calls in each family's format: what Orbit reads out of a text against what SGLang's detectors read, and what it was
written from."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.environments.tool_calls import parameter_schemas, parse_tool_calls
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.model_info.calls.formats import FORMATS
from orbit_runtime.workers.servers.process import PYTHON_VARIABLE

PROGRAM = Path(__file__).parent / "call_formats.py"
NUMBER = 300
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "find-all_of_them",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"}, "most": {"type": "integer"}, "ratio": {"type": "number"},
                    "deep": {"type": "boolean"}, "tags": {"type": "array"}, "options": {"type": "object"},
                    "kind": {"enum": ["web page", "image"]},
                    "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip
WORDS = ("sum", "é", " two ", "\n", "it's", "<b>", "`x`", "&amp;", "今日", "🙂", "{a}", "\t", "// no", "#1")
NESTED: tuple[Any, ...] = (
    "text", 'a\n<b>&\'"', "", 3, 2.5, -1, True, None, [], {}, [1, {"é": None}], {"k": ["v", False]}, "\\n", "🙂",
)  # fmt: skip
Calls = list[tuple[str, dict[str, Any]]]


def words(draw: random.Random) -> str:
    return "".join(draw.choices(WORDS, k=draw.randrange(1, 5)))


def arguments(draw: random.Random) -> dict[str, Any]:
    values: dict[str, Callable[[], Any]] = {
        # Not what SGLang takes out of quotes, or for JSON, although the schema says string.
        "query": lambda: "say: " + words(draw), "most": lambda: draw.randrange(-9, 10**12),
        "ratio": lambda: draw.choice([0.5, -2.25, 1e-7, 3]), "deep": lambda: draw.random() < 0.5,
        "tags": lambda: draw.sample(NESTED, k=draw.randrange(4)),
        "options": lambda: {words(draw): draw.choice(NESTED) for _ in range(draw.randrange(3))},
        "kind": lambda: draw.choice(["web page", "image"]), "limit": lambda: draw.choice([None, 7]),
    }  # fmt: skip
    return {name: values[name]() for name in draw.sample([*values], k=draw.randrange(len(values) + 1))}


def calls(draw: random.Random, most: int) -> Calls:
    count = draw.randrange(1, most + 1)
    return [("now", {}) if draw.random() < 0.2 else ("find-all_of_them", arguments(draw)) for _ in range(count)]


def kimi(made: Calls, draw: random.Random) -> str:
    text = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
        f"{json.dumps(given, ensure_ascii=draw.random() < 0.5)}<|tool_call_end|>"
        for index, (name, given) in enumerate(made)
    )
    return f"<|tool_calls_section_begin|>{text}<|tool_calls_section_end|>"


def harmony(made: Calls, draw: random.Random) -> str:
    ((name, given),) = made
    return (
        f"<|channel|>analysis<|message|>{words(draw)}<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.{name} <|constrain|>json<|message|>{json.dumps(given)}<|call|>"
    )


def shortened(made: Calls, draw: random.Random) -> str:
    """The calls as GLM-4.7 writes them."""
    return "".join(
        f"<tool_call>{name}"
        + "".join(f"<arg_key>{key}</arg_key><arg_value>{as_text(value)}</arg_value>" for key, value in given.items())
        + "</tool_call>"
        for name, given in made
    )


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def by_template(folder: Path, name: str) -> Callable[[Calls, random.Random], str]:
    """Writes calls as a published chat template writes them; TRL keeps it."""
    found = find_spec("trl")
    assert found is not None
    assert found.origin is not None
    shutil.copytree(builtin_folder("tiny-adder", "BF16"), folder)
    shutil.copy(Path(found.origin).parent / "chat_templates" / f"{name}.jinja", folder / "chat_template.jinja")
    tokenizer = ChatTokenizer(folder)

    def write(made: Calls, draw: random.Random) -> str:
        content = draw.choice(["", "I see."])
        functions = [{"function": {"name": of, "arguments": given}} for of, given in made]
        asked = {"role": "user", "content": "?"}
        answer = {"role": "assistant", "content": content, "tool_calls": functions}
        return tokenizer.render([asked, answer], answer=False).removeprefix(tokenizer.render([asked], answer=False))

    return write


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, Calls]]]:
    """For each detector, texts and the calls that they were written from."""
    folders = tmp_path_factory.mktemp("templates")
    writers = {
        "Kimi": kimi, "harmony": harmony, "GLM-4.7": shortened, "GLM": by_template(folders / "glm", "glm4moe"),
        "Qwen3-Coder": by_template(folders / "coder", "qwen3_6"), "Hermes": by_template(folders / "qwen3", "qwen3"),
    }  # fmt: skip
    draw = random.Random(7)
    texts: dict[str, list[tuple[str, Calls]]] = {}
    for name, write in writers.items():
        texts[name] = []
        for _ in range(NUMBER):
            made = calls(draw, 1 if name == "harmony" else 4)
            before = "" if name == "harmony" else draw.choice(["", "<think>\nhm</think>\n\n", words(draw)])
            texts[name].append((before + write(made, draw), made))
    return texts


def read(texts: list[str], own: str) -> list[Calls]:
    schemas = parameter_schemas(TOOLS)
    found = [parse_tool_calls(text, schemas, FORMATS.get(own)) for text in texts]
    assert not [call.error for each in found for call in each if call.error]
    return [[(call.name, dict(call.arguments)) for call in each] for each in found]


def test_calls_are_what_they_were_written_from_and_what_sglang_reads(
    written: dict[str, list[tuple[str, Calls]]], tmp_path: Path
) -> None:
    file = tmp_path / "asked.json"
    sent = {
        # Its detector only knows an answer with the words that the prompt ends with.
        name: [("<|start|>assistant" if name == "harmony" else "") + text for text, _ in texts]
        for name, texts in written.items()
    }
    file.write_text(json.dumps({"tools": TOOLS, "texts": sent}))
    ran = subprocess.run(
        [os.environ[PYTHON_VARIABLE], str(PROGRAM), str(file)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    theirs = json.loads(ran.stdout.splitlines()[-1])
    for name, texts in written.items():
        for own in ("", name):
            ours = read([text for text, _ in texts], own)
            assert ours == [made for _, made in texts], name
        for (text, _), mine, each in zip(texts, ours, theirs[name], strict=True):
            assert mine == [tuple(call) for call in each], f"{name}: {text}"
