"""The planner's bytes against what trainer and engine allocate, part by part, on tiny models in every format, CPU; and
against what the fullest of two ranks holds, by division.

Runs two `test_planned_memory.py`, of `tests/models` and of `tests/megatron`, which check every part to within 5 %, and
tabulates their measurements.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Measured, NotMeasured, run

ROOT = Path(__file__).parents[1]
TESTS = tuple(ROOT / "tests" / folder / "test_planned_memory.py" for folder in ("models", "megatron"))
MEASURES = (
    "orbit_runtime/planner", "orbit_runtime/policy", "orbit_runtime/adapters", "orbit_runtime/training",
    "orbit_runtime/rollout", "orbit_runtime/quant", "tests/models/test_planned_memory.py",
    "tests/megatron/test_planned_memory.py",
)  # fmt: skip
SMALLEST = "int4-LoRA or TP2-tiny-adder-INT4"
"""The cases that `--smallest` measures."""
TARGET = 0.05


class Collector:
    """Keeps the figures of the module that pytest imported."""

    def __init__(self) -> None:
        self.figures: dict[str, dict[str, tuple[int, int]]] = {}
        self.by_module: dict[str, dict[str, dict[str, tuple[int, int]]]] = {}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        for item in session.items:
            found = item.module.FIGURES  # type: ignore[attr-defined]
            self.figures |= found
            self.by_module[item.module.__name__] = found  # type: ignore[attr-defined]


def measure(options: argparse.Namespace) -> Measured:
    collector = Collector()
    asked = [*map(str, TESTS), *(("-k", SMALLEST) if options.smallest else ())]
    code = pytest.main([*asked, "-q", "--no-header", "-p", "no:cacheprovider"], plugins=[collector])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not collector.figures:
        raise NotMeasured(f"pytest ended with {code} and {len(collector.figures)} cases")
    for name, cases in collector.by_module.items():
        # Of stages nobody measures what a pass keeps.
        alike = {case: sorted(parts) for case, parts in cases.items() if not case.startswith("PP")}
        if not cases or len({*map(tuple, alike.values())}) > 1:
            raise NotMeasured(f"the cases of {name} are not measured alike: {alike}")
    rows, worst = {}, 0.0
    print(f"{'model, adapter':40} {'part':18} {'measured':>12} {'planned':>12} {'error':>8}")
    for case, parts in collector.figures.items():
        for part, (measured, planned) in parts.items():
            if not measured:
                raise NotMeasured(f"{case}: nothing was allocated for {part}")
            error = planned / measured - 1
            worst = max(worst, abs(error))
            rows[f"{case}: {part}"] = {"measured": measured, "planned": planned, "error": error}
            print(f"{case:40} {part:18} {measured:12,} {planned:12,} {error:8.2%}")
    print(f"largest error {worst:.2%}, allowed {TARGET:.0%}")
    refused = "" if code == pytest.ExitCode.OK else f"tests failed; the largest error is {worst:.2%}"
    return Measured(figures={"parts": rows, "largest_error": worst}, facts={"target": TARGET}, refused=refused)


if __name__ == "__main__":
    raise SystemExit(run(__file__, __doc__, measure))
