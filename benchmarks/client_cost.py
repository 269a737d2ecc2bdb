"""Processor time that rollout takes from the thread that trains, for each token that a real SGLang server sampled.

    ORBIT_SGLANG_PYTHON=$(tools/sglang_python.sh) .venv/bin/python benchmarks/client_cost.py

Steps overlap, as with `rollout.maxStaleness: 1`: episodes are played in their own thread, the server is asked in
another. What is left for the thread that trains is to begin a step, to take it once it is complete, and to measure the
staleness of its tokens. The time of all threads of this process is told beside it.

Belongs here: the whole way from the server's stream to a step's groups. Does not belong here: training on them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from orbit_runtime.types import Prompt, Sampling
from orbit_runtime.workers.system import gc_paused, wait_asleep

MEASURES = (
    "orbit_runtime/loop/collector.py", "orbit_runtime/loop/multiplexer.py", "orbit_runtime/loop/buffer.py",
    "orbit_runtime/loop/collect.py",
    "orbit_runtime/environments", "orbit_runtime/rollout", "benchmarks/sglang_rig.py",
)  # fmt: skip
PROMPTS, GROUP, TOKENS = 8, 8, 200
TARGET_MICROSECONDS = 0.1


def scored(completion: str, prompt: object, fields: object) -> float:
    return float(len(completion))


def measure(options: argparse.Namespace) -> harness.Measured:
    # As `orbit run` does, before torch is imported.
    wait_asleep(os.environ)
    harness.need_sglang()
    from benchmarks.sglang_rig import started

    steps, tokens = (1, 8) if options.smallest else (options.repetitions, TOKENS)
    with ExitStack() as closing:
        # As a run starts: what it keeps is not walked by garbage collections in the middle of steps.
        with gc_paused():
            rig = closing.enter_context(started("LoRA"))
            rig.move(0, 0.02)
            publication = rig.publish()
        trains, everything = _steps(rig, publication, steps, tokens)
    print(f"microseconds a token: the thread that trains {trains:.4f}, all threads of this process {everything:.2f}")
    return harness.Measured(
        figures={
            "microseconds a token, the thread that trains": trains,
            "microseconds a token, all threads of the run's process": everything,
        },
        facts={"answers": PROMPTS * GROUP, "tokens of each": tokens, "steps": steps, "target": TARGET_MICROSECONDS},
    )


def _steps(rig: Any, publication: Any, steps: int, tokens: int) -> tuple[float, float]:
    """Medians over steps; the first is not counted."""
    from orbit_runtime.environments.turns import SingleTurn
    from orbit_runtime.loop.collect import measure_staleness
    from orbit_runtime.loop.collector import Collector
    from orbit_runtime.workers.child.signals import StopFlag
    from orbit_runtime.workers.user_code.reward_pool import RewardThreads
    from orbit_runtime.workers.user_code.reward_protocol import RewardTarget

    trains, everything = [], []
    sampling = Sampling(max_new_tokens=tokens, ignore_eos=True)
    with RewardThreads([RewardTarget("length", scored)]) as scorer:
        environment = SingleTurn("cost", rig.tokenizer, scorer, {"length": 1.0}, sampling, GROUP, seed=0)
        with Collector(environment, rig.engine) as collector:
            collector.switch(publication)
            for step in range(1, steps + 2):
                whole, own = time.process_time(), time.thread_time()
                collector.begin(step, [_prompt(step, place) for place in range(PROMPTS)])
                own = time.thread_time() - own
                # Training would take this time.
                while sum(each.played is not None for each in collector.keep()) < PROMPTS * GROUP:
                    time.sleep(0.2)
                taken = time.thread_time()
                collected = collector.take(step, StopFlag())
                assert collected is not None
                measure_staleness(collected.groups_P, publication.adapter.version)
                own += time.thread_time() - taken
                count = sum(sum(each.loss_mask_T) for group in collected.groups_P for each in group.rollouts_G)
                assert count == PROMPTS * GROUP * tokens
                trains.append(own / count * 1e6)
                everything.append((time.process_time() - whole) / count * 1e6)
    return statistics.median(trains[1:]), statistics.median(everything[1:])


def _prompt(step: int, place: int) -> Prompt:
    content = f"{10 + step}+{10 + place}="
    return Prompt(f"cost/{step}-{place}", 0, ({"role": "user", "content": content},))


if __name__ == "__main__":
    raise SystemExit(harness.run(__file__, __doc__, measure))
