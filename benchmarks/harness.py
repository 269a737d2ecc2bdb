"""Measure A against B fairly in one process: alternate them, compare medians, print a table, write JSON.

Belongs here: timing and writing results. Does not belong here: what is measured (one program each).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Comparison:
    """Times in seconds, one per repetition, A and B taking turns. `ratio` is B / A: above 1, A is faster."""

    name: str
    a: str
    b: str
    median_a: float
    median_b: float
    ratio: float
    """Median over repetitions of B's time / A's time in the same turn: what both suffer from cancels out."""
    target: float | None
    repetitions: int


def compare(
    name: str,
    a: tuple[str, Callable[[], object]],
    b: tuple[str, Callable[[], object]],
    *,
    repetitions: int = 15,
    calls: int = 1,
    target: float | None = None,
) -> Comparison:
    """Time `calls` calls of A, then of B, and again; two turns to warm up are not counted."""
    times_a, times_b = [], []
    for turn in range(repetitions + 2):
        # Who goes first changes, so that neither always finds the caches the other left.
        pair = ((times_a, a[1]), (times_b, b[1]))
        for times, function in pair if turn % 2 else reversed(pair):
            start = time.perf_counter()
            for _ in range(calls):
                function()
            times.append((time.perf_counter() - start) / calls)
    times_a, times_b = times_a[2:], times_b[2:]
    ratio = statistics.median(y / x for x, y in zip(times_a, times_b, strict=True))
    return Comparison(
        name, a[0], b[0], statistics.median(times_a), statistics.median(times_b), ratio, target, repetitions
    )


def table(comparisons: list[Comparison]) -> str:
    lines = [f"{'what':<44} {'A ms':>10} {'B ms':>10} {'B/A':>7} {'target':>7}  A vs B"]
    for row in comparisons:
        target = "" if row.target is None else f"{row.target:.2f}"
        times = f"{row.median_a * 1e3:>10.3f} {row.median_b * 1e3:>10.3f} {row.ratio:>7.2f} {target:>7}"
        lines.append(f"{row.name:<44} {times}  {row.a} vs {row.b}")
    return "\n".join(lines)


def save(name: str, comparisons: list[Comparison], facts: Mapping[str, object], folder: Path = RESULTS) -> Path:
    """`<folder>/<name>.json`: the comparisons, other facts, and the machine."""
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    content = {"name": name, "comparisons": [asdict(row) for row in comparisons], "facts": dict(facts)}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content | {"machine": machine}, indent=2, sort_keys=True) + "\n")
    return path


def stolen_seconds() -> float:
    """CPU time that this machine's host has given to others since it started; 0 where nothing tells."""
    try:
        first = Path("/proc/stat").read_text().partition("\n")[0].split()
    except OSError:
        return 0.0
    return int(first[8]) / os.sysconf("SC_CLK_TCK")


def arguments(description: str) -> argparse.Namespace:
    """What every benchmark takes: `--out FOLDER`, `--repetitions N`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON file")
    parser.add_argument("--repetitions", type=int, default=15, help="turns that are counted")
    return parser.parse_args()
