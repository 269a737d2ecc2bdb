"""Converts rows of well-known files to Orbit's: a prompt and what its reward expects, with nothing left to guess.

Belongs here: which columns such files have, extracting an answer, lettering choices. Pure: a row in, a row out.
Does not belong here: files (`preparation`), scoring (`environments.rewards`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orbit_runtime.data.permutation import shuffled
from orbit_runtime.data.scan import kind_of, row_problem
from orbit_runtime.seeds import stream_key

LETTERS = "ABCDEFGHIJ"
BOXED = r"Put the final answer within \boxed{}."
LETTER = 'End with "Answer: " and the letter of the right choice.'


class RowError(ValueError):
    """Why a row cannot be prepared; names the column."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The columns of a file. A column is a name, or a path through objects such as `reward_model.ground_truth`; of
    several, the first that the row has."""

    prompt: tuple[str, ...]
    answer: tuple[str, ...] = ()
    extract: str = "none"
    """A name of `EXTRACT`."""
    choices: tuple[str, ...] = ()
    """One column with a list of choices, or one column per choice, of which the first is the right one."""
    tests: tuple[str, ...] = ()
    instruction: str = ""
    """Text appended to the prompt."""
    kept: tuple[str, ...] = ()
    """Further columns that are copied to the result if a row has them."""
    reward: str = "Math"
    """The shipped reward that reads the result."""


SHAPES: dict[str, Shape] = {
    "gsm8k": Shape(("question",), ("answer",), "hash", instruction=BOXED),
    "math": Shape(
        ("problem", "question"), ("answer", "solution"), "boxed", instruction=BOXED, kept=("level", "subject", "type")
    ),
    "aime": Shape(
        ("problem", "question", "Problem", "Question"), ("answer", "Answer"), "integer", instruction=BOXED,
        kept=("id", "ID", "year"),
    ),
    "gpqa": Shape(
        ("Question", "question"), instruction=LETTER, kept=("High-level domain", "Subdomain"), reward="MultipleChoice",
        choices=("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
    ),
    "mmlu": Shape(
        ("question",), ("answer", "answer_index"), choices=("choices", "options"), instruction=LETTER,
        kept=("subject", "category"), reward="MultipleChoice",
    ),
    "verl": Shape(("prompt",), ("reward_model.ground_truth",), kept=("data_source",)),
    "mbpp": Shape(("prompt", "text"), tests=("test_list",), kept=("task_id",), reward="Code",
        instruction="Write the function in one Python code block."),
    "apps": Shape(
        ("question",), tests=("input_output",), kept=("difficulty",), reward="Code",
        instruction="Write a program that reads standard input, in one Python code block.",
    ),
    "plain": Shape(("prompt", "question", "problem"), ("answer",)),
}  # fmt: skip
"""`--format` → the columns of its files. `verl`: files prepared by that package's scripts, such as DAPO-Math-17k."""


@dataclass(frozen=True, slots=True)
class RequestedShape:
    """A shape, and the choices made for the whole file."""

    shape: Shape
    seed: int = 0
    """Seed of the order of choices."""
    shuffle: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)


def build_row(row: Mapping[str, Any], asked: RequestedShape) -> dict[str, Any]:
    """Example: `{"prompt": "1+1?\\n\\nPut …", "answer": "2"}`

    Raises:
        RowError: a column is missing or has an invalid value.
    """
    shape = asked.shape
    name, prompt = _first(row, shape.prompt, "the prompt")
    problem = row_problem({name: prompt}, name)
    if problem:
        raise RowError(problem)
    built: dict[str, Any] = {}
    if shape.choices:
        prompt, built["answer"] = _lettered(row, str(prompt), asked)
    elif shape.tests:
        built["tests"] = _tests(row, shape.tests)
    else:
        column, answer = _first(row, shape.answer, "the answer")
        # Of several columns, the last is the worked solution; an earlier one has only the answer.
        is_alone = shape.extract in ("hash", "boxed") and column != shape.answer[-1]
        extract = "none" if is_alone else shape.extract
        built["answer"] = EXTRACT[extract](_text(answer, column), column)
    kept = {column: row[column] for column in shape.kept if row.get(column) is not None}
    return {"prompt": _with_instruction(prompt, shape.instruction), **built, **kept, **asked.extra}


def _with_instruction(prompt: Any, instruction: str) -> Any:
    if not instruction:
        return prompt
    if isinstance(prompt, str):
        return f"{prompt.rstrip()}\n\n{instruction}"
    *before, last = prompt
    if not isinstance(last.get("content"), str):
        raise RowError("the prompt's last message holds no text that an instruction could follow")
    return [*before, {**last, "content": f"{last['content'].rstrip()}\n\n{instruction}"}]


def _lettered(row: Mapping[str, Any], question: str, asked: RequestedShape) -> tuple[str, str]:
    """The question with its choices, and the right one's letter."""
    columns = asked.shape.choices
    listed = next((name for name in columns if isinstance(row.get(name), list)), None)
    if listed is not None:
        choices = [_text(each, listed) for each in row[listed]]
        right = _right(row, choices, asked.shape.answer)
    else:
        choices, right = [_text(_first(row, (name,), "a choice")[1], name) for name in columns], 0
    if not 2 <= len(choices) <= len(LETTERS):
        raise RowError(f"there are {len(choices)} choices: a question has 2 to {len(LETTERS)}")
    if len(set(choices)) < len(choices):
        raise RowError("two of its choices are the same")
    order = range(len(choices))
    # A file without a list has the right choice first: the order must be drawn, or every answer would be A.
    if asked.shuffle or listed is None:
        order = shuffled(len(choices), stream_key(asked.seed, "choices", question))  # type: ignore[assignment]
    lines = "\n".join(f"{LETTERS[place]}) {choices[index]}" for place, index in enumerate(order))
    return f"{question.rstrip()}\n\n{lines}", LETTERS[[*order].index(right)]


def _right(row: Mapping[str, Any], choices: Sequence[str], columns: Sequence[str]) -> int:
    """Index of the right choice, given by number from 0, letter or text."""
    column, answer = _first(row, columns, "the answer")
    if isinstance(answer, int) and not isinstance(answer, bool):
        if 0 <= answer < len(choices):
            return answer
    elif isinstance(answer, str):
        letter = LETTERS[: len(choices)].find(answer.strip().upper()) if len(answer.strip()) == 1 else -1
        found = letter if letter >= 0 else [*choices, answer].index(answer)
        if found < len(choices):
            return found
    raise RowError(f"column {column!r} is none of {len(choices)} choices: {answer!r}")


def _tests(row: Mapping[str, Any], columns: Sequence[str]) -> list[Any]:
    column, tests = _first(row, columns, "the tests")
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError:
            tests = [tests]
    if isinstance(tests, Mapping) and isinstance(tests.get("inputs"), list) and isinstance(tests.get("outputs"), list):
        if "fn_name" in tests:
            raise RowError(f"column {column!r} calls the function {tests['fn_name']!r}; programs are tested here")
        if len(tests["inputs"]) != len(tests["outputs"]):
            raise RowError(f"column {column!r} has {len(tests['inputs'])} inputs and {len(tests['outputs'])} outputs")
        return [
            {"input": _lines(given), "output": _lines(expected)}
            for given, expected in zip(tests["inputs"], tests["outputs"], strict=True)
        ]
    if isinstance(tests, list) and tests:
        return tests
    raise RowError(f"column {column!r} is a list of tests, or has 'inputs' and 'outputs': this is {kind_of(tests)}")


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _first(row: Mapping[str, Any], columns: Sequence[str], what: str) -> tuple[str, Any]:
    """The first column that the row has, and its value."""
    for column in columns:
        value: Any = row
        if column in row:
            value = row[column]
        else:
            for piece in column.split("."):
                value = value.get(piece) if isinstance(value, Mapping) else None
        if value is not None and value != "":
            return column, value
    named = " or ".join(map(repr, columns)) or "any column"
    raise RowError(f"{what} is not in {named}; the row has: {', '.join(map(repr, row)) or 'no keys'}")


def _text(value: Any, column: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(f"column {column!r} holds {kind_of(value)}, but text is expected")
    return str(value).strip()


def _after_hashes(text: str, column: str) -> str:
    _, mark, answer = text.rpartition("####")
    if not mark or not answer.strip():
        raise RowError(f"column {column!r} has no result after ####")
    return answer.strip().replace(",", "")


def _boxed(text: str, column: str) -> str:
    r"""The content of the last `\boxed` or `\fbox`, braces balanced; without braces, the number or letter after it."""
    marks = [*re.finditer(r"\\(?:boxed|fbox)\s*", text)]
    rest = text[marks[-1].end() :] if marks else ""
    if rest and not rest.startswith("{"):
        found = re.match(r"[^\s$]+", rest)
        if found:
            return found[0]
    depth = 0
    for place, sign in enumerate(rest):
        escaped = place and rest[place - 1] == "\\"
        depth += 0 if escaped else (sign == "{") - (sign == "}")
        if not depth:
            answer = rest[1:place].strip()
            if answer:
                return answer
            break
    raise RowError(f"column {column!r} has no \\boxed{{…}} with an answer")


def _integer(text: str, column: str) -> str:
    found = re.fullmatch(r"0*(\d{1,3})(?:\.0+)?", text)
    if found is None:
        raise RowError(f"column {column!r} is not a whole number from 0 to 999: {text!r}")
    return found[1]


def _as_it_is(text: str, column: str) -> str:
    if not text:
        raise RowError(f"column {column!r} is empty")
    return text


EXTRACT: dict[str, Callable[[str, str], str]] = {
    "none": _as_it_is,
    "hash": _after_hashes,
    "boxed": _boxed,
    "integer": _integer,
}
"""`--extract` → the part of a column that is the answer."""
