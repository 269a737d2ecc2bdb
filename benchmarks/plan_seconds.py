"""`orbit plan` of a card with 10¹² parameters, the whole command: start of Python, facts, plan, table."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import arguments, save

ROOT = Path(__file__).parents[1]
EXAMPLES = ("kimi-k2-6", "deepseek-v4-pro", "qwen3-4b")
TARGET = 1.0


def seconds(example: str) -> float:
    program = [sys.executable, "-m", "orbit_runtime.cli", "plan", f"examples/{example}.yaml"]
    began = time.perf_counter()
    subprocess.run(
        program, check=True, stdout=subprocess.DEVNULL, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    return time.perf_counter() - began


def main() -> None:
    options = arguments(__doc__ or "")
    facts: dict[str, object] = {"target": TARGET}
    for example in EXAMPLES:
        took = [seconds(example) for _ in range(options.repetitions)][1:]
        facts[example] = {"median": statistics.median(took), "max": max(took)}
        print(f"{example:18} median {statistics.median(took):.2f} s, at most {max(took):.2f} s; target {TARGET} s")
    print(save("plan_seconds", [], facts, options.out))


if __name__ == "__main__":
    main()
