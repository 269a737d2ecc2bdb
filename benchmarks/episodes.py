"""The overhead of episodes and rewards above their own time: 256 concurrent episodes, 100,000 cheap rewards.

    python -m benchmarks.episodes

Episodes: an environment of four turns that sleeps in each, in processes of its own as in a run, and a policy that
answers at once. The ideal is the sleep alone: processes are started before, and the time for that is reported
separately. Rewards: the pool of worker processes, called as in a step, 2,048 at a time, with a function that returns a
number.

Belongs here: Orbit's share of an episode. Does not belong here: the engine's (`generation_vs_transformers`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import ROOT, Measured, run, stolen_seconds

MEASURES = ("orbit_runtime/environments", "orbit_runtime/workers")
EPISODES, TURNS, SECONDS = 256, 4, 1.0
REWARDS, AT_A_TIME = 100_000, 2048
TARGETS = {"share of the environment's time": 0.10, "rewards per second": 20_000}


class AtOnce:
    """A policy that always answers at once with the same five tokens (`types.TokenSource`)."""

    async def sample(self, prompt_ids_T: Sequence[int], sampling: Any, *, key: int) -> Any:
        from orbit_runtime.types import Completion

        return Completion(0, array("i", [5, 6, 7, 8, 1]), array("f", [-1.0] * 5), array("i", [0] * 5), "stop", "4567")


def play(episodes: int, seconds: float) -> tuple[float, float]:
    """Seconds of a first round, which starts the processes, and of a second round of all episodes."""
    from orbit_runtime.data.chat import ChatTokenizer
    from orbit_runtime.environments.episodes import EpisodeLimits, EpisodeSettings
    from orbit_runtime.environments.turns import MultiTurn, OwnProcess
    from orbit_runtime.model_info.builtin_models import builtin_folder
    from orbit_runtime.types import Prompt, Sampling
    from orbit_runtime.workers.user_code.environment_pool import EnvironmentPool
    from orbit_runtime.workers.user_code.environment_protocol import EnvironmentLimits, EnvironmentTarget
    from orbit_runtime.workers.user_code.reward_pool import RewardPool

    target = EnvironmentTarget("benchmarks.waiting_games:WaitingGame", {"seconds": seconds, "turns": TURNS})
    tokenizer = ChatTokenizer(builtin_folder("tiny-caller", "INT4"))
    settings = EpisodeSettings("run", Sampling(max_new_tokens=8), EpisodeLimits(TURNS, None, 4096), 8, 0, True)
    prompts = [Prompt(f"p{number}", 0, ({"role": "user", "content": "1+2="},), {}) for number in range(episodes // 8)]
    with (
        EnvironmentPool(target, limits=EnvironmentLimits(processes=episodes), search_path=[str(ROOT)]) as pool,
        RewardPool([], num_workers=1) as scorer,
    ):
        environment = MultiTurn(settings, tokenizer, scorer, {}, lambda: OwnProcess(pool.open_episode()))

        async def round_() -> float:
            started = time.perf_counter()
            played = await asyncio.gather(
                *(environment.play(each, AtOnce()) for each in environment.build_episodes(prompts, 1))
            )
            assert {each.rollout.outcome for each in played} == {"value"}, played[0].reasons
            assert {len(each.rollout.turns) for each in played} == {2 * TURNS}
            return time.perf_counter() - started

        return asyncio.run(round_()), asyncio.run(round_())


def score(rewards: int) -> float:
    """Rewards per second, with workers already running."""
    from orbit_runtime.workers.user_code.reward_pool import RewardPool
    from orbit_runtime.workers.user_code.reward_protocol import RewardCall, RewardTarget

    target = RewardTarget("half", "benchmarks.waiting_games:half")
    prompt = [{"role": "user", "content": "12+34="}]
    calls = [RewardCall("half", str(number), prompt, {"answer": "46"}) for number in range(AT_A_TIME)]
    with RewardPool([target], search_path=[str(ROOT)]) as pool:
        pool.score(calls)
        started = time.perf_counter()
        for _ in range(-(-rewards // AT_A_TIME)):
            results = pool.score(calls)
        seconds = time.perf_counter() - started
    assert all(result.value == 0.5 for result in results)
    return -(-rewards // AT_A_TIME) * AT_A_TIME / seconds


def measure(options: argparse.Namespace) -> Measured:
    episodes, seconds, rewards = (16, 0.01, AT_A_TIME) if options.smallest else (EPISODES, SECONDS, REWARDS)
    stolen = stolen_seconds()
    rounds = [play(episodes, seconds) for _ in range(options.repetitions)]
    shares = [second / (TURNS * seconds) - 1.0 for _, second in rounds]
    rates = [score(rewards) for _ in range(options.repetitions)]
    share, rate = statistics.median(shares), statistics.median(rates)
    print(f"{episodes} episodes of {TURNS} turns: {share:.1%} above {TURNS * seconds:.2f} s; target 10 %")
    print(f"{rewards} rewards: {rate:,.0f} a second; target {TARGETS['rewards per second']:,}")
    return Measured(
        figures={
            "share of the environment's time": share,
            "each": shares,
            "seconds with the making of processes": [first for first, _ in rounds],
            "rewards per second": rate,
            "each rate": rates,
        },
        facts={"episodes": episodes, "turns": TURNS, "seconds a turn": seconds, "rewards": rewards, "targets": TARGETS,
               "load": os.getloadavg()[0], "stolen_seconds": stolen_seconds() - stolen},
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(run(__file__, __doc__, measure, repetitions=3))
