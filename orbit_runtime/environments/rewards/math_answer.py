"""1 if the completion's last mathematical expression equals the expected one, by the library math-verify."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

# Takes a second, so it belongs to the worker's start: inside the function it would count against the first call.
from math_verify import parse, verify  # type: ignore[import-untyped]

from orbit_runtime.workers.user_code.reward_protocol import WrongAnswer

for _name in ("math_verify.parser", "math_verify.grader"):
    # Each worker would warn that there is no time limit, although the worker itself has one.
    logging.getLogger(_name).setLevel(logging.ERROR)


def math_answer(
    completion: str, prompt: Sequence[Mapping[str, str]], fields: Mapping[str, Any], *, field: str = "answer"
) -> float:
    """If the expected answer is a worked solution with its result after `####` (GSM8K's form), only that result counts.

    Raises WrongAnswer if the completion holds no expression at all.
    """
    # The library's own time limits use signals of the main thread; this process is ended from outside instead.
    expected = str(fields[field]).rpartition("####")[2].strip()
    gold = parse(f"${expected}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"column {field!r} holds no mathematical expression: {fields[field]!r}")
    found = parse(completion, parsing_timeout=None)
    if not found:
        raise WrongAnswer("no mathematical expression in the completion")
    return float(verify(gold, found, timeout_seconds=None))
