"""The share of tests that the completion's Python passes, each run in its own sandbox."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from orbit_runtime.workers.user_code.reward_protocol import WrongAnswer
from orbit_runtime.workers.user_code.sandbox import SandboxLimits, run_program

_BLOCK = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL)


def code_tests(
    completion: str,
    prompt: Sequence[Mapping[str, Any]],
    fields: Mapping[str, Any],
    *,
    field: str = "tests",
    all_or_nothing: bool = True,
    seconds: float = 5.0,
    memory_mib: int = 256,
) -> float:
    """Column `field` holds a list of tests: either `{"input": …, "output": …}`, standard input and the expected output,
    compared without trailing white space; or text, Python code that is appended to the completion's and raises
    on error.

    Runs the completion's last code block, or all of it if it has none. Raises WrongAnswer if that is empty. A test that
    runs in the completion's process can be deceived by it; one of input and output cannot.
    """
    blocks = _BLOCK.findall(completion)
    program = blocks[-1] if blocks else completion
    if not program.strip():
        raise WrongAnswer("the completion holds no code")
    tests = fields[field]
    if isinstance(tests, str):
        tests = [tests]
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"column {field!r} is a list of tests, or one as text")
    limits = SandboxLimits(seconds=seconds, memory_bytes=memory_mib << 20)
    passed = 0
    for test in tests:
        is_passed = _passes(program, test, limits, field)
        if all_or_nothing and not is_passed:
            return 0.0
        passed += is_passed
    return passed / len(tests)


def _passes(program: str, test: Any, limits: SandboxLimits, field: str) -> bool:
    if isinstance(test, str):
        return run_program(f"{program}\n\n{test}\n", limits=limits).ended == "done"
    if not isinstance(test, Mapping) or not {"input", "output"} <= test.keys():
        raise ValueError(f"a test of column {field!r} is text, or has 'input' and 'output'")
    result = run_program(program, str(test["input"]), limits)
    return result.ended == "done" and _lines(result.output) == _lines(str(test["output"]))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
