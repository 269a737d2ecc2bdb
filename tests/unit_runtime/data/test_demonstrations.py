"""Demonstrations as tokens: masks cover exactly the answers, and a template that does not allow it is named."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.data.demonstrations import (
    Demonstration,
    encode_demonstrations,
    read_demonstration,
    read_demonstrations,
)
from orbit_runtime.data.prompts import hold_out, load_prompts
from orbit_runtime.data.rows import PromptSource
from orbit_runtime.data.samples import build_demonstration_samples
from orbit_runtime.errors import DataError, ModelError
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.spec.data import Prompts
from orbit_runtime.types import Prompt

FOLDER = builtin_folder("tiny-adder", "INT4")
QWEN3 = """
{%- for message in messages -%}
{%- if message.role == 'assistant' and not loop.last -%}
{{- '<|assistant|>' + message.content.split('=')[-1] + '<|im_end|>' -}}
{%- else -%}
{{- '<|' + message.role + '|>' + message.content + '<|im_end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
"""As Qwen3's, it leaves out what stands before an answer's last part once more follows."""
CALLING = """
{%- if tools -%}{{- '<|system|>' -}}{%- for tool in tools -%}{{- tool.function.name -}}{%- endfor -%}
{{- '<|im_end|>' -}}{%- endif -%}
""" + QWEN3.replace(".split('=')[-1]", "")
"""It names the functions that may be called before all else."""


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(FOLDER)


def with_template(tmp_path: Path, template: str) -> ChatTokenizer:
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    (folder / "chat_template.jinja").write_text(template)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return ChatTokenizer(folder)


def said(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "user" if place % 2 == 0 else "assistant", "content": text} for place, text in enumerate(texts)]


def demonstration(*texts: str, last_only: bool = False) -> Demonstration:
    prompt = Prompt("file/0", 0, tuple(said(*texts)), {})
    return read_demonstration(prompt, completion_field=None, last_only=last_only)


digits = st.text("0123456789+=", min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(digits, digits), min_size=1, max_size=4))
def test_a_mask_covers_exactly_the_answers_and_what_ends_them(turns: list[tuple[str, str]]) -> None:
    tokenizer = ChatTokenizer(FOLDER)
    (found,) = encode_demonstrations(
        [demonstration(*(text for turn in turns for text in turn))], tokenizer, max_tokens=999, place_of=str
    )
    tokens, mask = list(found.token_ids_T), list(found.loss_mask_T)
    # The template written out: what is learned lies between the assistant's mark and the end of its answer.
    expected = []
    for question, answer in turns:
        asked = tokenizer.encode_text(f"<|user|>{question}<|im_end|><|assistant|>")
        told = tokenizer.encode_text(f"{answer}<|im_end|>")
        expected += [(token, 0) for token in asked] + [(token, 1) for token in told]
    assert list(zip(tokens, mask, strict=True)) == expected
    assert tokens[-1] in tokenizer.eos_ids


def test_before_every_answer_stands_what_a_rollout_would_be_asked(tokenizer: ChatTokenizer) -> None:
    (found,) = encode_demonstrations([demonstration("1+1=", "2", "2+2=", "4")], tokenizer, max_tokens=99, place_of=str)
    starts = [at for at, flag in enumerate(found.loss_mask_T) if flag and not found.loss_mask_T[at - 1]]
    prompts = [tokenizer.encode_chat(said("1+1=")), tokenizer.encode_chat(said("1+1=", "2", "2+2="))]
    assert [list(found.token_ids_T[:at]) for at in starts] == prompts


def test_only_the_last_answer_where_that_is_asked(tokenizer: ChatTokenizer) -> None:
    (found,) = encode_demonstrations(
        [demonstration("1+1=", "2", "2+2=", "4", last_only=True)], tokenizer, max_tokens=99, place_of=str
    )
    learned = [token for token, flag in zip(found.token_ids_T, found.loss_mask_T, strict=True) if flag]
    assert learned == tokenizer.encode_text("4<|im_end|>")
    (sample,) = build_demonstration_samples([found])
    assert sample.prefix_length == len(found.token_ids_T) - len(learned)


def test_a_prompt_and_its_completion_are_the_conversation_of_both(tokenizer: ChatTokenizer) -> None:
    asked = Prompt("file/0", 0, tuple(said("1+1=")), {"answer": "2", "more": [{"role": "assistant", "content": "2"}]})
    both = [read_demonstration(asked, completion_field=field) for field in ("answer", "more")]
    whole = encode_demonstrations([*both, demonstration("1+1=", "2")], tokenizer, max_tokens=99, place_of=str)
    assert whole[0] == whole[1] == whole[2]


def test_a_template_without_the_prefix_property_is_refused_where_it_begins(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, QWEN3)
    with pytest.raises(DataError) as caught:
        encode_demonstrations([demonstration("1+1=", "1=2", "2+2=", "4")], tokenizer, max_tokens=99, place_of=str)
    message = str(caught.value)
    assert caught.value.where == "file/0"
    assert "prefix property at message 1" in message
    # The first difference, in both readings.
    assert "'1=2<|im_end|>'" in message
    assert "'2<|im_end|><|user|>2+2=<|im_end|>" in message
    assert "spec.data.chat.answers: Last" in str(caught.value.fix)
    # The way out holds, and a conversation of one turn needs none.
    (last,) = encode_demonstrations(
        [demonstration("1+1=", "1=2", "2+2=", "4", last_only=True)], tokenizer, max_tokens=99, place_of=str
    )
    assert sum(last.loss_mask_T) == 2
    encode_demonstrations([demonstration("1+1=", "1=2")], tokenizer, max_tokens=99, place_of=str)


def test_a_template_that_does_not_end_answers_is_refused(tmp_path: Path) -> None:
    unended = QWEN3.replace("<|im_end|>", "")
    tokenizer = with_template(tmp_path, unended)
    with pytest.raises(DataError, match="message 1 ends without one of the model's end tokens"):
        encode_demonstrations([demonstration("1+1=", "2")], tokenizer, max_tokens=99, place_of=str)


def test_demonstrations_that_are_too_long_are_named_and_not_cut(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(DataError, match=r"1 of 2 demonstrations are longer than 8 tokens:\n  file/0: \d+ tokens"):
        encode_demonstrations(
            [demonstration("1", "2"), demonstration("1" * 20, "2")], tokenizer, max_tokens=8, place_of=str
        )


def test_the_functions_of_a_row_reach_the_template_and_are_not_learned(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, CALLING)
    functions = [{"type": "function", "function": {"name": name}} for name in ("add", "halve")]
    rows = [
        {"prompt": "1+1=", "answer": "2", "functions": functions},
        {"prompt": "2+2=", "answer": "4", "functions": functions[:1]},
        {"prompt": "3+3=", "answer": "6"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Prompts(uri=str(file), completion_field="answer", tools_field="functions")
    table = load_prompts([PromptSource(source.uri, source.format, source.prompt_field, "rows", file)])
    found = encode_demonstrations(
        read_demonstrations(table, [source], last_only=False), tokenizer, max_tokens=99, place_of=str
    )
    assert [tokenizer.decode_all(list(each.token_ids_T)) for each in found] == [
        "<|system|>addhalve<|im_end|><|user|>1+1=<|im_end|><|assistant|>2<|im_end|>",
        "<|system|>add<|im_end|><|user|>2+2=<|im_end|><|assistant|>4<|im_end|>",
        "<|user|>3+3=<|im_end|><|assistant|>6<|im_end|>",
    ]
    assert [sum(each.loss_mask_T) for each in found] == [2, 2, 2]


@pytest.mark.parametrize(
    ("messages", "fields", "completion", "says"),
    [
        (said("1+1="), {}, None, "no message has the role `assistant`"),
        (said("1+1="), {}, "answer", "the column 'answer' holds no answer"),
        (said("1+1="), {"answer": ""}, "answer", "the column 'answer' holds no answer"),
        (said("1+1="), {"answer": 2}, "answer", "the column 'answer' holds no answer"),
        (said("1+1="), {"answer": [{"content": "2"}]}, "answer", "the column 'answer' holds no answer"),
        (said("1+1="), {"answer": "2", "tools": "add"}, "answer", "the column 'tools' does not contain a list"),
    ],
)
def test_a_row_without_an_answer_is_refused(
    messages: list[dict[str, Any]], fields: dict[str, Any], completion: str | None, says: str
) -> None:
    with pytest.raises(DataError, match=says) as caught:
        read_demonstration(
            Prompt("file/7", 0, tuple(messages), fields), completion_field=completion, tools_field="tools"
        )
    assert caught.value.where == "file/7"


def test_errors_name_the_file_and_the_line_of_a_row(tmp_path: Path) -> None:
    tables = []
    for name, rows in {"a": [("1+1=", "2")], "b": [("2+2=", "4"), ("3" * 40, "6"), ("4+4=", "")]}.items():
        file = tmp_path / f"{name}.jsonl"
        # A blank line in front: a line's number is not the row's.
        file.write_text("\n" + "".join(json.dumps({"prompt": q, "answer": a}) + "\n" for q, a in rows))
        tables.append(Prompts(uri=str(file), completion_field="answer"))
    opened = [PromptSource(each.uri, each.format, each.prompt_field, "p", Path(each.uri)) for each in tables]
    table = load_prompts(opened)
    with pytest.raises(DataError, match="'answer' holds no answer") as caught:
        read_demonstrations(table, tables, last_only=False)
    assert caught.value.where == f"{tmp_path}/b.jsonl, line 4 (p-2/2)"
    good = read_demonstrations(load_prompts(opened, limit=3), tables, last_only=False)
    with pytest.raises(DataError, match=re.escape(f"\n  {tmp_path}/b.jsonl, line 3 (p-2/1): ")) as caught:
        encode_demonstrations(good, ChatTokenizer(FOLDER), max_tokens=20, place_of=table.prompts_P.place_of)
    assert caught.value.where == "spec.data.prompts"
    whole = Prompt("p-2/0", 0, tuple(said("1+1=", "1=2", "2+2=", "4")), {})
    turns, tokenizer = read_demonstration(whole, completion_field=None), with_template(tmp_path, QWEN3)
    with pytest.raises(DataError, match="prefix property") as caught:
        encode_demonstrations([turns], tokenizer, max_tokens=99, place_of=table.prompts_P.place_of)
    assert caught.value.where == f"{tmp_path}/b.jsonl, line 2 (p-2/0)"


def test_what_is_held_out_is_a_share_that_the_seed_chooses(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{n}"}) + "\n" for n in range(100)))
    table = load_prompts([PromptSource(str(path))])
    left, held = hold_out(table, 0.05, seed=3)
    assert len(held) == 5
    assert {each.prompt_id for each in (*left.prompts_P, *held)} == {each.prompt_id for each in table.prompts_P}
    again, held_again = hold_out(table, 0.05, seed=3)
    assert ([*again.prompts_P], held_again) == ([*left.prompts_P], held)
    assert hold_out(table, 0.05, seed=4)[1] != held
    assert hold_out(table, 0.0, seed=3) == (table, ())
    assert len(hold_out(table, 1e-6, seed=3)[1]) == 1
    with pytest.raises(DataError, match="leaves none to train on"):
        hold_out(replace(table, prompts_P=table.prompts_P[:1]), 0.5, seed=0)


GLM = (
    "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|im_end|>' if m.role == 'tool' else '#' }}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}#{% endif %}"
)
"""As GLM's: an answer ends with the marker of the next role, which is one of the model's end tokens."""


def glm(tmp_path: Path) -> ChatTokenizer:
    folder = with_template(tmp_path, GLM)._folder
    ids = [ChatTokenizer(folder).encode_text(name)[0] for name in ("<|user|>", "<|im_end|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return ChatTokenizer(folder)


@pytest.mark.parametrize("last_only", [False, True])
def test_an_answer_that_the_next_roles_marker_ends_is_learned_with_it(tmp_path: Path, last_only: bool) -> None:
    tokenizer = glm(tmp_path)
    asked = demonstration("1+1=", "2", "2+2=", "4", last_only=last_only)
    (found,) = encode_demonstrations([asked], tokenizer, max_tokens=64, place_of=str)
    text = "<|user|>1+1=#2<|user|>2+2=#4<|user|>"
    assert tokenizer.decode_all(found.token_ids_T) == text
    learned = [token for token, is_learned in zip(found.token_ids_T, found.loss_mask_T, strict=True) if is_learned]
    assert tokenizer.decode_all(learned) == ("4<|user|>" if last_only else "2<|user|>4<|user|>")


def test_an_answer_that_calls_ends_with_the_marker_of_results(tmp_path: Path) -> None:
    tokenizer = glm(tmp_path)
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "7", "arguments": {}}}]}
    asked = Demonstration("file/0", [*said("1"), call], (1,))
    (found,) = encode_demonstrations([asked], tokenizer, max_tokens=64, place_of=str)
    assert tokenizer.decode_all(found.token_ids_T) == "<|user|>1#7<|im_end|>"


def test_a_demonstration_that_the_template_drops_a_part_of_is_named(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, QWEN3.replace("if message.role ==", "if message.role == 'developer' -%}\n"
                                                      "{%- elif message.role =="))  # fmt: skip
    bad = Demonstration("file/1", [{"role": "developer", "content": "x"}, *said("1", "2")], (2,))
    good = Demonstration("file/0", said("1", "2"), (1,))
    assert encode_demonstrations([good], tokenizer, max_tokens=64, place_of=str)
    with pytest.raises(ModelError, match=r"leaves out message 0, of role 'developer' \(row file/1\)") as caught:
        encode_demonstrations([good, bad], tokenizer, max_tokens=64, place_of=lambda name: f"row {name}")
    assert caught.value.exit_code == 66
