"""The planner's bytes against what trainer and engine allocate, part by part, on tiny models in every format, CPU.

Runs `tests/models/test_planned_memory.py`, which measures and holds every part to 5 %, and tabulates what it saw.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import arguments, save

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests" / "integration" / "test_planned_memory.py"
TARGET = 0.05


class Collector:
    """Keeps the figures of the module that pytest imported."""

    def __init__(self) -> None:
        self.figures: dict[str, dict[str, tuple[int, int]]] = {}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        for item in session.items:
            self.figures |= item.module.FIGURES  # type: ignore[attr-defined]


def main() -> int:
    options = arguments(__doc__ or "")
    collector = Collector()
    code = pytest.main([str(TESTS), "-q", "--no-header", "-p", "no:cacheprovider"], plugins=[collector])
    rows, worst = {}, 0.0
    print(f"{'model, adapter':16} {'part':18} {'measured':>12} {'planned':>12} {'error':>8}")
    for case, parts in collector.figures.items():
        for part, (measured, planned) in parts.items():
            error = planned / measured - 1 if measured else 0.0
            worst = max(worst, abs(error))
            rows[f"{case}: {part}"] = {"measured": measured, "planned": planned, "error": error}
            print(f"{case:16} {part:18} {measured:12,} {planned:12,} {error:8.2%}")
    print(f"largest error {worst:.2%}, allowed {TARGET:.0%}")
    print(save("planned_memory", [], {"parts": rows, "largest_error": worst, "target": TARGET}, options.out))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
