"""Steps an hour with `rollout.maxStaleness: 1` against 0: episodes of two turns whose tool takes half a second.

    python -m benchmarks.pipelined

Answers have long-tailed lengths (`long_tail`), and the environment sleeps half a second after each (`waiting_games`).
Both runs have the same manifest except for `maxStaleness`, and take turns, each continued from its own folder; a step
is measured from the end of the previous one to its own end, publish, proof and checkpoint included.

Belongs here: the time that overlapping saves. Does not belong here: its effect on rewards (`objectives`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import ROOT, Comparison, Measured, run, stolen_seconds, table
from benchmarks.long_tail import LEARNING_RATE, build_model_folder
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.spec import OrbitRun

MEASURES = ("orbit_runtime/loop", "orbit_runtime/environments", "orbit_runtime/rollout", "orbit_runtime/training")
PROMPTS, GROUP, TURNS, SECONDS, TOKENS = 4, 4, 2, 0.5, 64
"""More or longer answers would keep both cores busy all the time, leaving nothing to overlap."""
WARMUP_STEPS, STEPS = 2, 8
TARGET = 1.5


class Clock(SilentProgress):
    """When each step ended."""

    def __init__(self) -> None:
        self.ended: list[float] = []

    def step(self, row: Any) -> None:
        self.ended.append(time.perf_counter())


def manifest(folder: Path, staleness: int, steps: int, options: argparse.Namespace) -> OrbitRun:
    small = options.smallest
    return OrbitRun.model_validate({
        "apiVersion": "orbitrl.dev/v1alpha1",
        "kind": "OrbitRun",
        "metadata": {"name": "benchmark"},
        "spec": {
            "model": {"uri": str(folder), "precision": "BF16", "maxSequenceLength": 512},
            "adapter": {"type": "LoRA", "lora": {"rank": 16, "alpha": 32.0}},
            "algorithm": {"type": "GRPO", "groupSize": 2 if small else options.group},
            "data": {"prompts": [{"uri": "builtin://two-digit-addition"}]},
            "environment": {
                "type": "MultiTurn",
                "entrypoint": "benchmarks.waiting_games:WaitingGame",
                "arguments": {"seconds": 0.01 if small else options.tool_seconds, "turns": TURNS},
                "rewards": [],
            },
            "rollout": {"maxStaleness": staleness, "sampling": {"maxNewTokens": 4 if small else options.tokens}},
            "training": {
                "steps": steps, "promptsPerStep": 2 if small else options.prompts, "learningRate": LEARNING_RATE,
            },
            "observability": {"metricsPort": -1},
        },
    })  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tool-seconds", type=float, default=SECONDS, help="what the tool takes")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="of a step")
    parser.add_argument("--group", type=int, default=GROUP, help="answers to each")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of an answer at most")


def measure(options: argparse.Namespace) -> Measured:
    from orbit_runtime.loop import run as train

    steps = 2 if options.smallest else STEPS
    times: dict[int, list[float]] = {0: [], 1: []}
    stolen = stolen_seconds()
    with tempfile.TemporaryDirectory() as scratch:
        folder = build_model_folder(Path(scratch) / "model")
        for turn in range(options.repetitions):
            for staleness in (0, 1) if turn % 2 else (1, 0):
                clock, asked = Clock(), (turn + 1) * (WARMUP_STEPS + steps)
                out = str(Path(scratch) / f"k{staleness}")
                train(manifest(folder, staleness, asked, options), out=out, progress=clock, manifest_folder=ROOT)
                times[staleness].append((clock.ended[-1] - clock.ended[-1 - steps]) / steps)
    ratio = statistics.median(slow / fast for slow, fast in zip(times[0], times[1], strict=True))
    row = Comparison(
        f"a step of {TURNS} turns, tool {options.tool_seconds} s", "k = 1", "synchronous",
        statistics.median(times[1]), statistics.median(times[0]), ratio, TARGET, options.repetitions,
    )  # fmt: skip
    print(table([row]))
    return Measured(
        [row],
        figures={"steps an hour": {f"k = {k}": 3600.0 / statistics.median(each) for k, each in times.items()}},
        facts={"prompts": options.prompts, "group": options.group, "tool seconds": options.tool_seconds,
               "tokens at most": options.tokens, "stolen_seconds": stolen_seconds() - stolen},
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(run(__file__, __doc__, measure, add_options, repetitions=3))
