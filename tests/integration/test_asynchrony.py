"""`rollout.maxStaleness`: 0 has the bits of the plainest loop; above it no token is too old, none is lost or trained
on twice, whatever ends the run."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.data.records import decompress_rollouts
from orbit_runtime.loop import run
from orbit_runtime.loop.advantages import build_batch
from orbit_runtime.loop.buffer import EpisodeSnapshot
from orbit_runtime.loop.build import CallerOptions, build_parts, open_episode_inputs
from orbit_runtime.loop.collect import build_groups
from orbit_runtime.loop.display import RunDisplay
from orbit_runtime.loop.keep import load_rollouts
from orbit_runtime.loop.parts import Parts
from orbit_runtime.loop.resume import CHECKPOINTS
from orbit_runtime.observability.metrics import RunMetrics
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.observability.status import LiveStatus
from orbit_runtime.sides.inputs import Inputs, resolve_names
from orbit_runtime.sides.machine import machine_facts
from orbit_runtime.spec import OrbitRun, resolve
from orbit_runtime.storage import Store, claim_execution, newest_readable, open_store
from orbit_runtime.storage.cache import RetryPolicy
from orbit_runtime.types import Completion, Engine, Request, Rollout, Sampling
from tests.integration.killing import adapter_digests, demanding_manifest, small_manifest
from tests.integration.run_launcher import RunLauncher

STEPS, PROMPTS, GROUP = 10, 4, 4
pytestmark = pytest.mark.timeout(1200)
"""Several starts each; beside other work one alone has taken half a minute."""


def manifest(max_staleness: int, **sampling: Any) -> dict[str, Any]:
    made = small_manifest(steps=STEPS)
    made["spec"]["rollout"] = {"maxStaleness": max_staleness, "sampling": {"maxNewTokens": 24, **sampling}}
    return made


class AllAtOnce:
    """A `TokenSource` that asks the engine once, for everything that a step needs, and waits for all of it."""

    def __init__(self, engine: Engine, adapter: str) -> None:
        self.engine, self.adapter = engine, adapter
        self.requests: list[Request] = []
        self.found: list[asyncio.Future[Completion]] = []

    async def sample(self, prompt_ids_T: Any, sampling: Sampling, *, key: int) -> Completion:
        self.requests.append(Request(len(self.requests), key, tuple(prompt_ids_T), sampling, self.adapter))
        self.found.append(asyncio.get_running_loop().create_future())
        return await self.found[-1]

    async def answer(self) -> None:
        self.engine.submit(self.requests)
        async for completion in self.engine.completions():
            self.found[completion.request_id].set_result(completion)


def plain_run(parts: Parts) -> list[str]:
    """Sample, train, publish, in one thread, one after the other: digests of the adapter after each step."""
    publication, digests = parts.publisher.publish(0, None), []
    for step in range(1, parts.spec.training.steps + 1):
        prompts = parts.prompts.take(parts.spec.training.prompts_per_step)

        async def collect(step: int = step, prompts: Any = prompts, name: str = publication.name) -> list[Rollout]:
            tokens = AllAtOnce(parts.engine, name)
            episodes = parts.environment.build_episodes(prompts, step)
            playing = [asyncio.create_task(parts.environment.play(each, tokens)) for each in episodes]
            await asyncio.sleep(0)
            assert len(tokens.requests) == len(episodes)
            await tokens.answer()
            return [each.rollout for each in await asyncio.gather(*playing)]

        groups = build_groups(prompts, asyncio.run(collect()))
        parts.trainer.update(build_batch(parts.spec, parts.algorithm, parts.trainer, groups))
        parts.publisher.keeper.wait()
        before, publication = publication, parts.publisher.publish(step, publication)
        parts.engine.unload_adapter(before.name)
        digests.append(publication.adapter.digest)
    return digests


@pytest.mark.parametrize(
    "name",
    [
        "small",
        pytest.param("OFT on NVFP4, its own teacher", marks=pytest.mark.long),
        pytest.param("MXFP4, PPO with KL", marks=pytest.mark.long),
    ],
)
def test_no_staleness_has_the_bits_of_the_plainest_loop(tmp_path: Path, name: str) -> None:
    asked = small_manifest(steps=6) if name == "small" else demanding_manifest(name, steps=3)
    spec = OrbitRun.model_validate(asked)
    run(spec, out=str(tmp_path / "run"), progress=SilentProgress())
    with ExitStack() as closing:
        resolved, store = resolve(spec, machine_facts()), open_store(str(tmp_path / "plain"))
        execution = claim_execution(store, run_name=spec.name)
        closing.callback(lambda: execution.release("done"))
        show = RunDisplay(SilentProgress(), LiveStatus(spec.name, total=0), RunMetrics(run=spec.name))
        inputs, names = Inputs(resolved.run.spec, {}, RetryPolicy(), []), resolve_names(resolved.run, None)
        given = CallerOptions()
        materials = open_episode_inputs(resolved.run, names, inputs, given, show, closing)
        parts = build_parts(
            resolved, store, execution, show, given=given, inputs=inputs, materials=materials, closing=closing
        )
        assert plain_run(parts) == adapter_digests(open_store(str(tmp_path / "run")))


def slow_now_and_then(completion: str, prompt: Any, fields: Any) -> float:
    """A reward whose time differs, so that steps overlap otherwise each time."""
    time.sleep(0.02 * (len(completion) % 3))
    return float(len(completion) % 2)


@pytest.mark.parametrize("bound", [*(pytest.param(each, marks=pytest.mark.long) for each in (1, 2)), 4])
def test_no_token_is_older_than_it_may_be_and_prompts_come_in_their_order(tmp_path: Path, bound: int) -> None:
    spec = OrbitRun.model_validate(manifest(bound))
    run(spec, out=str(tmp_path), rewards={"correct": slow_now_and_then}, progress=SilentProgress())
    store = open_store(str(tmp_path))
    rows = [json.loads(line) for line in store.get("metrics.jsonl").splitlines()]
    ages: list[int] = []
    for row, rollouts in zip(rows, trained(store).values(), strict=True):
        # Step s trains the policy that s - 1 updates made.
        age = [row["step"] - 1 - version for each in rollouts for version in each.versions_T if version >= 0]
        assert 0 <= min(age) <= max(age) <= bound
        assert row["staleness_max"] == max(age)
        assert row["staleness_mean"] == pytest.approx(sum(age) / len(age))
        assert all(list(each.versions_T) == sorted(each.versions_T) for each in rollouts), "versions only grow"
        ages += age
    assert max(ages) == bound, "nothing overlapped: the test shows nothing"
    assert max(row["rollouts_waiting"] + row["rollouts_unfinished"] for row in rows) == bound * PROMPTS * GROUP
    other = tmp_path / "synchronous"
    run(OrbitRun.model_validate(manifest(0)), out=str(other), progress=SilentProgress())
    assert names(store) == names(open_store(str(other))), "which step a prompt trains in does not depend on timing"


def trained(store: Store) -> dict[int, list[Rollout]]:
    """Rollouts of each step."""
    keys = sorted(key for key in store.list("rollouts/") if key.endswith(".jsonl.zst"))
    found = [decompress_rollouts(store.get(key)) for key in keys]
    return {rollouts[0].step: rollouts for rollouts in found}


def names(store: Store) -> list[tuple[int, str, int]]:
    return [(step, each.prompt_id, each.sample_index) for step, all_ in trained(store).items() for each in all_]


def check_kept(store: Store, kept: list[tuple[int, tuple[EpisodeSnapshot, ...]]]) -> None:
    """What stood in a checkpoint that the run went on from was trained on, as it was and once."""
    found = trained(store)
    assert sorted(found) == list(range(1, STEPS + 1))
    once = [each[1:] for each in names(store)]
    assert len(set(once)) == len(once) == STEPS * PROMPTS * GROUP
    for step, rollouts in kept:
        for each in rollouts:
            assert each.step > step
            rollout = found[each.step][each.number]
            if each.played is not None:
                assert rollout == each.played.rollout
                continue
            start = rollout.loss_mask_T.index(1)
            for paid in each.paid:
                count = len(paid.completion.token_ids_T)
                assert count
                assert rollout.token_ids_T[start : start + count] == paid.completion.token_ids_T
                assert rollout.logprobs_T[start : start + count] == paid.completion.logprobs_T
                assert rollout.versions_T[start : start + count] == paid.completion.versions_T


def newest(store: Store) -> tuple[int, tuple[EpisodeSnapshot, ...]]:
    """The checkpoint that the next execution goes on from."""
    bundle, _ = newest_readable(store, CHECKPOINTS)
    return (int(bundle.facts["step"]), load_rollouts(bundle)) if bundle else (0, ())


def newest_step(store: Store) -> int:
    complete = [key.split("/")[1] for key in store.list("checkpoints/") if key.endswith("/manifest.json")]
    return max((int(name.removeprefix("step-")) for name in complete), default=0)


def until_newer(store: Store, step: int) -> None:
    deadline = time.monotonic() + 600
    while newest_step(store) <= step:
        assert time.monotonic() < deadline, f"no checkpoint after step {step} in ten minutes"
        time.sleep(0.005)


@pytest.mark.parametrize("bound", [pytest.param(1, marks=pytest.mark.long), 3])
def test_kills_at_random_moments_lose_no_rollout_that_a_checkpoint_keeps(
    tmp_path: Path, launcher: RunLauncher, bound: int
) -> None:
    asked, out, rng = manifest(bound, ignoreEos=True), str(tmp_path), random.Random(bound)
    store, kept = open_store(out), []
    for _ in range(3):
        done = newest_step(store)
        pid = launcher.start(asked, out)
        until_newer(store, done)
        time.sleep(rng.uniform(0, 0.3))
        os.kill(pid, signal.SIGKILL)
        code = launcher.wait()
        kept.append(newest(store))
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert launcher.run(asked, out) == 0
    assert any(each.played for _, all_ in kept for each in all_), "no checkpoint kept a rollout: the test shows nothing"
    check_kept(store, kept)


def test_a_stop_keeps_what_was_sampled_until_then(tmp_path: Path, launcher: RunLauncher) -> None:
    asked, out = manifest(2, ignoreEos=True, maxNewTokens=60), str(tmp_path)
    store = open_store(out)
    pid = launcher.start(asked, out)
    until_newer(store, 1)
    os.kill(pid, signal.SIGTERM)
    assert launcher.wait() == 75
    step, kept = newest(store)
    assert kept
    assert launcher.run(asked, out) == 0
    check_kept(store, [(step, kept)])
