"""A whole RL step on a quantised base against the same step on the BF16 base that it was converted from.

Belongs here: the bases, taking turns in one process. Does not belong here: what a step does (`orbit_runtime.loop`).

The learning rate is so small that all bases keep answering as they did, so that steps have answers of like length.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Comparison, Measured, add_model_option, real_model, run, table
from benchmarks.rl_step_vs_trl import REAL, Turns, orbit_turn
from orbit_runtime.model_info.builtin_models import builtin_folder

MEASURES = (
    "orbit_runtime/loop", "orbit_runtime/training", "orbit_runtime/rollout", "orbit_runtime/policy",
    "orbit_runtime/adapters", "orbit_runtime/quant", "orbit_runtime/algorithms", "orbit_runtime/parity",
)  # fmt: skip
PRECISIONS = ("BF16", "INT4", "NVFP4")


def measure(options: argparse.Namespace) -> Measured:
    shape, turns = replace(REAL, learning_rate=1e-6, steps_per_turn=2), max(3, options.repetitions // 3)
    if options.smallest:
        shape, turns = replace(shape, prompts=1, group=2, max_new_tokens=4, steps_per_turn=1), 1
    is_real = options.model == "real"
    folders = {"BF16": real_model()} if is_real else {each: builtin_folder("tiny-adder", each) for each in PRECISIONS}
    with tempfile.TemporaryDirectory() as temporary:
        scratch, sides = Path(temporary), {}
        for precision in PRECISIONS:
            if precision not in folders:
                folders[precision] = scratch / precision
                names = str(folders["BF16"]), str(folders[precision])
                command = [sys.executable, "-m", "orbit_runtime", "convert", *names, "--precision", precision]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            turn = orbit_turn(replace(shape, precision=precision), folders[precision], scratch / f"{precision}-run")
            sides[precision] = turn, Turns()
        for number in range(turns):
            for turn, measured in [*sides.values()][:: 1 if number % 2 else -1]:
                turn(measured)
    seconds = {precision: measured.seconds for precision, (_, measured) in sides.items()}
    rows = [
        Comparison(
            f"RL step, 8 x 8, up to 48 tokens, {precision} base", f"{precision} base", "BF16 base",
            statistics.median(seconds[precision]), statistics.median(seconds["BF16"]),
            statistics.median(b / a for a, b in zip(seconds[precision], seconds["BF16"], strict=True)), 0.8, turns,
        )
        for precision in PRECISIONS[1:]
    ]  # fmt: skip
    tokens = {f"mean_tokens_{each}": statistics.mean(measured.tokens) for each, (_, measured) in sides.items()}
    print(table(rows))
    return Measured(rows, {"seconds": seconds, **tokens}, variant="real" if is_real else "")


if __name__ == "__main__":
    raise SystemExit(run(__file__, __doc__, measure, add_model_option))
