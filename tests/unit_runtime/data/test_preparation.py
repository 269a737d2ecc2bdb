"""`orbit data prepare`: files of each format, what is extracted, digests, and files that are wrong."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbit_runtime.cli.main import run_command
from orbit_runtime.data.shapes import EXTRACT, LETTERS, SHAPES, RequestedShape, RowError, build_row
from orbit_runtime.environments.rewards.code_tests import code_tests
from orbit_runtime.environments.rewards.math_answer import math_answer
from orbit_runtime.environments.rewards.text import multiple_choice

FILES = Path(__file__).parents[2] / "data/files"
Captured = pytest.CaptureFixture[str]


def prepared(name: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    out = folder / "made.jsonl"
    assert run_command(["data", "prepare", str(FILES / name), str(out), *options]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def raw(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FILES / name).read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "shape", "answers"),
    [
        ("gsm8k.jsonl", "gsm8k", ["240", "1200", "-5"]),
        ("math.jsonl", "math", [r"\frac{5}{6}", r"\{-2,2\}", "4"]),
        ("math-500.jsonl", "math", [r"6\sqrt{2}", r"9\pi"]),
        ("aime.jsonl", "aime", ["15", "1"]),
        ("verl.jsonl", "verl", ["221", "221", "1024"]),
    ],
)
def test_answers_of_mathematics_are_those_that_the_reward_accepts(
    name: str, shape: str, answers: list[str], tmp_path: Path
) -> None:
    rows = prepared(name, tmp_path, "--format", shape)
    assert [row["answer"] for row in rows] == answers
    for row, before in zip(rows, raw(name), strict=True):
        said = before.get("problem") or before.get("question") or before["prompt"][-1]["content"]
        text = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        assert text.startswith(said.rstrip())
        assert math_answer(f"So it is $\\boxed{{{row['answer']}}}$.", (), row) == 1.0
        assert math_answer("So it is $\\boxed{987654}$.", (), row) == 0.0


def test_choices_are_lettered_in_an_order_that_the_seed_draws(tmp_path: Path) -> None:
    rows = prepared("gpqa.csv", tmp_path, "--format", "gpqa")
    rights = ["the photon", "thymine", "=+3"]
    for row, right in zip(rows, rights, strict=True):
        assert f"\n{row['answer']}) {right}\n" in row["prompt"] + "\n"
        assert multiple_choice(f"Answer: {row['answer']}", (), row) == 1.0
        assert row["High-level domain"]
    again = prepared("gpqa.csv", tmp_path, "--format", "gpqa")
    assert again == rows
    seen = {
        seed: [
            row["answer"] for row in prepared("gpqa.csv", tmp_path, "--format", "gpqa", "--seed", str(seed), "--force")
        ]
        for seed in range(6)
    }
    assert len({tuple(each) for each in seen.values()}) > 1
    assert {letter for each in seen.values() for letter in each} > {"A"}


def test_a_list_of_choices_keeps_its_order_where_that_is_asked(tmp_path: Path) -> None:
    rows = prepared("mmlu.jsonl", tmp_path, "--format", "mmlu", "--keep-order")
    assert [row["answer"] for row in rows] == ["B", "B"]
    assert "A) 4\nB) 8\nC) 16\nD) 32" in rows[0]["prompt"]


def test_programs_are_tested_by_what_was_prepared(tmp_path: Path) -> None:
    for row, before in zip(prepared("mbpp.jsonl", tmp_path, "--format", "mbpp"), raw("mbpp.jsonl"), strict=True):
        assert code_tests(f"```python\n{before['code']}\n```", (), row) == 1.0
        assert code_tests("```python\npass\n```", (), row) == 0.0
    sums, words = prepared("apps.jsonl", tmp_path, "--format", "apps", "--force")
    assert code_tests("print(sum(map(int, input().split())))", (), sums) == 1.0
    assert code_tests("n, *words = open(0).read().split()\nprint(*sorted(words), sep='\\n')", (), words) == 1.0


def test_parquet_and_a_list_of_json_prepare_to_the_same_bytes(tmp_path: Path) -> None:
    rows = raw("math.jsonl")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    made = []
    for name in (str(FILES / "math.jsonl"), str(tmp_path / "a.parquet"), str(tmp_path / "a.json")):
        out = tmp_path / f"{Path(name).suffix[1:]}.jsonl"
        assert run_command(["data", "prepare", name, str(out), "--format", "math"]) == 0
        made.append(out.read_bytes())
    assert made[0] == made[1] == made[2]


def test_columns_are_mapped_and_what_is_asked_for_is_kept(tmp_path: Path) -> None:
    (row, *_) = prepared(
        "math-500.jsonl", tmp_path, "--prompt", "problem", "--answer", "solution", "--extract", "boxed",
        "--keep", "unique_id", "--instruction", "",
    )  # fmt: skip
    assert row == {"prompt": r"Simplify $\sqrt{72}$.", "answer": r"6\sqrt{2}", "unique_id": "made/1.json"}
    (row, *_) = prepared("verl.jsonl", tmp_path, "--answer", "reward_model.ground_truth", "--force")
    assert row["answer"] == "221"
    assert row["prompt"][0]["content"].endswith("13*17?")


def test_the_manifest_holds_the_digests_and_the_same_command_does_nothing(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "folder/made.jsonl"
    command = ["data", "prepare", str(FILES / "verl.jsonl"), str(out), "--format", "verl", "--deduplicate", "--json"]
    assert run_command(command) == 0
    first = json.loads(capsys.readouterr().out)
    manifest = json.loads((tmp_path / "folder/made.jsonl.manifest.json").read_text())
    assert manifest["source"]["sha256"] == hashlib.sha256((FILES / "verl.jsonl").read_bytes()).hexdigest()
    assert manifest["result"]["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()
    assert (manifest["result"]["rows"], manifest["left_out"]) == (2, {"repeated": 1})
    assert first["is_new"]
    stamp = out.stat().st_mtime_ns
    assert run_command(command) == 0
    assert not json.loads(capsys.readouterr().out)["is_new"]
    assert out.stat().st_mtime_ns == stamp
    # Killed between its two writes, or edited since: the same command makes it whole.
    bytes_before = out.read_bytes()
    for spoil in (out.unlink, lambda: out.write_text("{}")):
        spoil()
        assert run_command(command) == 0
        assert out.read_bytes() == bytes_before
    assert sorted(each.name for each in out.parent.iterdir()) == ["made.jsonl", "made.jsonl.manifest.json"]


def test_another_preparation_is_not_replaced_unasked(tmp_path: Path, capsys: Captured) -> None:
    prepared("gsm8k.jsonl", tmp_path, "--format", "gsm8k")
    out = tmp_path / "made.jsonl"
    command = ["data", "prepare", str(FILES / "math.jsonl"), str(out), "--format", "math"]
    before = out.read_bytes()
    assert run_command(command) == 73
    assert "it holds another preparation" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert run_command([*command, "--force"]) == 0
    (tmp_path / "mine.jsonl").write_text("{}")
    assert run_command([*command[:3], str(tmp_path / "mine.jsonl"), "--format", "math"]) == 73


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([{"question": "q", "answer": "72"}], ["--format", "gsm8k"], ["line 1", "'answer' has no result after ####"]),
        ([{"question": "q"}], ["--format", "gsm8k"], ["line 1", "the answer is not in 'answer'"]),
        ([{"text": "q"}], ["--format", "gsm8k"], ["line 1", "the prompt is not in 'question'", "'text'"]),
        ([{"problem": "q", "solution": "\\boxed{3"}], ["--format", "math"], ["has no \\boxed{…}"]),
        ([{"problem": "q", "answer": 1000}], ["--format", "aime"], ["is not a whole number from 0 to 999: '1000'"]),
        ([{"problem": "q", "answer": [1]}], ["--format", "aime"], ["'answer' holds a list"]),
        ([{"question": "q", "choices": ["a", "a"], "answer": 0}], ["--format", "mmlu"], ["choices are the same"]),
        ([{"question": "q", "choices": ["a", "b"], "answer": 2}], ["--format", "mmlu"], ["is none of 2 choices: 2"]),
        ([{"question": "q", "choices": ["a"], "answer": 0}], ["--format", "mmlu"], ["there are 1 choices"]),
        ([{"question": "q", "input_output": "{}"}], ["--format", "apps"], ["'input_output' is a list of tests"]),
        ([{"question": "\ud800", "answer": "1"}], [], ["line 1", "half of a surrogate pair"]),
        ([{"question": "q", "answer": None}], [], ["the answer is not in 'answer'"]),
        ([{"question": "q", "answer": "1"}, {"question": 3, "answer": "1"}], [], ["line 2", "a number"]),
    ],
)
def test_a_row_that_cannot_be_prepared_is_named_or_left_out(
    rows: list[Any], options: list[str], words: list[str], tmp_path: Path, capsys: Captured
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out.jsonl"
    assert run_command(["data", "prepare", str(path), str(out), *options]) == 65
    said = capsys.readouterr().err
    for word in ("in.jsonl", *words):
        assert word in said
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in.jsonl"]
    code = run_command(["data", "prepare", str(path), str(out), *options, "--skip-broken", "--json"])
    if len(rows) == 1:
        assert code == 65
        assert json.loads(capsys.readouterr().out)["message"] == "no row is left"
    else:
        assert json.loads(capsys.readouterr().out)["left_out"] == {"broken": 1}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere.jsonl", "out.jsonl"], 65, "does not exist"),
        (["x.jsonl", "out.jsonl", "--format", "gsm9k"], 64, "no format is called 'gsm9k'"),
        (["x.jsonl", "out.jsonl", "--extract", "magic"], 64, "nothing is extracted by 'magic'"),
        (["gs://bucket/x.jsonl", "out.jsonl"], 65, "gs:// is not read here"),
    ],
)
def test_mistakes_of_the_command_line(arguments: list[str], code: int, words: str, capsys: Captured) -> None:
    assert run_command(["data", "prepare", *arguments]) == code
    said = capsys.readouterr().err
    assert words in said
    assert "spec.data" not in said, "there is no manifest here"


def last_boxed_only_string(string: str) -> str | None:
    """Of Hendrycks et al., MATH (2021), `modeling/math_equivalence.py` and `dataset/util.py`, as they are published."""
    idx = string.rfind("\\boxed")
    if idx < 0:
        idx = string.rfind("\\fbox")
        if idx < 0:
            return None
    i, right_brace_idx, num_left_braces_open = idx, None, 0
    while i < len(string):
        if string[i] == "{":
            num_left_braces_open += 1
        if string[i] == "}":
            num_left_braces_open -= 1
            if num_left_braces_open == 0:
                right_brace_idx = i
                break
        i += 1
    return None if right_brace_idx is None else string[idx : right_brace_idx + 1]


PIECES = st.sampled_from(["x", "{", "}", "^2", "\\frac{1}{2}", " ", "+"])


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES, max_size=6), st.lists(PIECES, min_size=1, max_size=8), st.lists(PIECES, max_size=4))
def test_what_is_boxed_is_what_the_data_set_s_own_function_finds(
    before: list[str], inside: list[str], after: list[str]
) -> None:
    text = f"{''.join(before)}\\boxed{{{''.join(inside)}}}{''.join(after)}"
    found = last_boxed_only_string(text)
    expected = found[len("\\boxed{") : -1].strip() if found else ""
    if expected:
        assert EXTRACT["boxed"](text, "solution") == expected
    else:
        with pytest.raises(RowError):
            EXTRACT["boxed"](text, "solution")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(min_size=1).filter(str.strip), min_size=2, max_size=10, unique_by=str.strip),
    st.integers(0, 9),
    st.integers(0, 99),
)
def test_the_letter_stands_before_the_right_choice(choices: list[str], right: int, seed: int) -> None:
    right %= len(choices)
    row: Mapping[str, Any] = {"question": "Which?", "choices": choices, "answer": right}
    built = build_row(row, RequestedShape(SHAPES["mmlu"], seed))
    lettered = built["prompt"].partition("Which?\n\n")[2]
    expected = f"{built['answer']}) {choices[right].strip()}"
    assert lettered.startswith(expected) or f"\n{expected}" in lettered
    assert built["answer"] in LETTERS[: len(choices)]
