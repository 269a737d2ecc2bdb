"""`orbit plan` of a model card with 10¹² parameters, the whole command: start of Python, facts, plan, table."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Measured, run

ROOT = Path(__file__).parents[1]
EXAMPLES = ("kimi-k2-6", "deepseek-v4-pro", "qwen3-4b")
MEASURES = ("orbit_runtime/planner", "orbit_runtime/model_info", "orbit_runtime/spec", "orbit_runtime/cli")
EXIT_CONFIG = 78
TARGET = 1.0


def seconds(example: str) -> float:
    program = [sys.executable, "-m", "orbit_runtime.cli", "plan", f"examples/{example}.yaml"]
    began = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, capture_output=True, cwd=ROOT, env=environment, text=True)
    took = time.perf_counter() - began
    # A plan that no trainer of this version can run is printed in full, then refused.
    if done.returncode not in (0, EXIT_CONFIG) or "fullest phase:" not in done.stdout:
        raise RuntimeError(f"orbit plan {example} ended with {done.returncode}: {done.stderr[-500:]}")
    return took


def measure(options: argparse.Namespace) -> Measured:
    figures = {}
    for example in EXAMPLES[:1] if options.smallest else EXAMPLES:
        # The first run finds no compiled files and is not counted.
        took = [seconds(example) for _ in range(options.repetitions + 1)][1:]
        figures[example] = {"median": statistics.median(took), "max": max(took)}
        print(f"{example:18} median {statistics.median(took):.2f} s, at most {max(took):.2f} s; target {TARGET} s")
    return Measured(figures=figures, facts={"target": TARGET})


if __name__ == "__main__":
    raise SystemExit(run(__file__, __doc__, measure))
