"""Episodes of several turns under `rollout.maxStaleness`: no token is too old, turns go on under new versions, and what
was paid for survives kills."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.loop import run
from orbit_runtime.loop.buffer import EpisodeSnapshot
from orbit_runtime.loop.replay import replay
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage import Store, open_store
from orbit_runtime.types import Rollout
from tests.integration.killing import small_manifest
from tests.integration.run_launcher import RunLauncher
from tests.integration.test_asynchrony import newest, newest_step, trained, until_newer

STEPS, PROMPTS, GROUP = 4, 2, 6
pytestmark = pytest.mark.timeout(1200)

TOOLS = """
import time
from orbit_runtime.environments.tools import calculator


def calculate(expression: str) -> str:
    \"\"\"Computes, at its own pace.

    Args:
        expression: what to compute.
    \"\"\"
    time.sleep(0.1 * (sum(map(ord, expression)) % 5))
    return calculator.calculate(expression)
"""
TREES = """
import asyncio
from orbit_runtime.environments import Chosen


class SlowTree:
    rollouts = ["first"] * 2 + ["second"] * 4

    async def play(self, policy, prompt, fields, seed):
        async def continued(first):
            await asyncio.sleep(0.1 * (sum(map(ord, first.text)) % 5))
            return await first.say("Again:").answers(2)

        firsts = await policy.begin(prompt).answers(2)
        leaves = [leaf for both in await asyncio.gather(*map(continued, firsts)) for leaf in both]
        return [Chosen(each, float(fields["answer"] in each.text)) for each in [*firsts, *leaves]]
"""


def written(folder: Path, name: str, text: str) -> str:
    """The folder of code, which a run knows by its digest."""
    (folder / "code").mkdir()
    (folder / "code" / name).write_text(text)
    return str(folder / "code")


def tool_manifest(folder: Path, max_staleness: int) -> dict[str, Any]:
    """A model that calls a calculator, as in `examples/calculator.yaml`."""
    code = written(folder, "slow_tools.py", TOOLS)
    made = small_manifest(steps=STEPS)
    made["spec"] |= {
        "model": {"uri": "builtin://tiny-caller", "precision": "INT4", "maxSequenceLength": 256},
        "algorithm": {"groupSize": GROUP},
        "data": {"prompts": [{"uri": "builtin://two-digit-multiplication"}]},
        "environment": {
            "type": "MultiTurn", "tools": ["slow_tools:calculate"], "limits": {"turns": 2},
            "code": {"uri": code}, "rewards": [{"name": "correct", "type": "ExactMatch"}],
        },
        "rollout": {"maxStaleness": max_staleness, "sampling": {"maxNewTokens": 96}},
    }  # fmt: skip
    made["spec"]["training"] |= {"promptsPerStep": PROMPTS, "miniBatchPrompts": None}
    return made


def tree_manifest(folder: Path, max_staleness: int) -> dict[str, Any]:
    """Trees of answers, each of which is kept apart from the others until it ends."""
    code = written(folder, "slow_trees.py", TREES)
    made = small_manifest(steps=STEPS)
    made["spec"] |= {
        "algorithm": {"groupSize": GROUP},
        "environment": {
            "type": "MultiTurn", "entrypoint": "slow_trees:SlowTree", "code": {"uri": code}, "rewards": [],
        },
        "rollout": {"maxStaleness": max_staleness, "sampling": {"maxNewTokens": 24}},
    }  # fmt: skip
    made["spec"]["training"] |= {"promptsPerStep": PROMPTS, "miniBatchPrompts": None}
    return made


MANIFESTS = {"tool": tool_manifest, "tree": tree_manifest}


def versions(rollout: Rollout) -> list[int]:
    """Versions of its trained tokens, in order."""
    return [version for version, flag in zip(rollout.versions_T, rollout.loss_mask_T, strict=True) if flag]


def check_masks(rollout: Rollout) -> None:
    """Only answers of the policy train, each whole or not at all."""
    for turn in rollout.turns:
        flags = {*rollout.loss_mask_T[turn.start : turn.end]}
        assert flags <= ({0, 1} if turn.role == "assistant" else {0})
        assert len(flags) <= 1
    assert versions(rollout) == sorted(versions(rollout)), "versions only grow"
    assert all(version >= 0 for version in versions(rollout))


@pytest.mark.parametrize(
    ("name", "bound"),
    [("tree", 2), pytest.param("tool", 1, marks=pytest.mark.long), pytest.param("tool", 2, marks=pytest.mark.long),
     pytest.param("tree", 1, marks=pytest.mark.long)],
)  # fmt: skip
def test_turns_go_on_under_new_versions_and_no_token_is_older_than_it_may_be(
    tmp_path: Path, name: str, bound: int
) -> None:
    out = str(tmp_path / "out")
    run(OrbitRun.model_validate(MANIFESTS[name](tmp_path, bound)), out=out, progress=SilentProgress())
    store = open_store(out)
    rows = [json.loads(line) for line in store.get("metrics.jsonl").splitlines()]
    oldest, mixed = 0, 0
    for row, rollouts in zip(rows, trained(store).values(), strict=True):
        assert len(rollouts) == PROMPTS * GROUP
        # Step s trains the policy that s - 1 updates made.
        ages = [row["step"] - 1 - version for each in rollouts for version in versions(each)]
        assert 0 <= min(ages) <= max(ages) <= bound
        assert (row["staleness_max"], row["staleness_mean"]) == (max(ages), pytest.approx(sum(ages) / len(ages)))
        assert row["tokens"] == len(ages)
        if 0 in ages:  # stale tokens say nothing of parity
            assert row["parity_max"] < 1e-3, "the trainer finds the log-probs of every turn again"
        for each in rollouts:
            check_masks(each)
        oldest = max(oldest, *ages)
        mixed += sum(len({*versions(each)}) > 1 for each in rollouts)
        assert row["turns_mean"] > 1
    assert oldest == bound, "nothing overlapped: the test shows nothing"
    if name == "tool":
        assert mixed, "no episode went on under a newer version: the test shows nothing"
        assert sum(row["tool_calls"] for row in rows) > 0
    assert replay(store, steps=None, show=lambda _done, _total: None).is_equal


def check_kept(store: Store, name: str, kept: Sequence[tuple[int, tuple[EpisodeSnapshot, ...]]]) -> int:
    """What stood in a checkpoint that the run went on from trained, as it was and once; returns the answers found."""
    found = trained(store)
    assert sorted(found) == list(range(1, STEPS + 1))
    once = [(each.prompt_id, each.sample_index) for rollouts in found.values() for each in rollouts]
    assert len(set(once)) == len(once) == STEPS * PROMPTS * GROUP
    answers = 0
    for step, episodes in kept:
        for each in episodes:
            assert each.step > step
            size = 6 if name == "tree" else 1
            of_episode = found[each.step][each.number * size : (each.number + 1) * size]
            if each.played is not None:
                assert tuple(of_episode) == each.played.rollouts
                answers += 1
            for paid in each.paid:
                told, start = paid.completion, len(paid.prompt_ids_T)
                place = slice(start, start + len(told.token_ids_T))
                (rollout,) = [
                    one for one in of_episode
                    if tuple(one.token_ids_T[:start]) == paid.prompt_ids_T
                    and one.token_ids_T[place] == told.token_ids_T and all(one.loss_mask_T[place])
                    and one.logprobs_T[place] == told.logprobs_T
                ][:1]  # fmt: skip
                assert rollout.versions_T[place] == told.versions_T
                answers += 1
    return answers


@pytest.mark.long
@pytest.mark.parametrize(("name", "bound"), [("tool", 1), ("tool", 2), ("tree", 2)])
def test_kills_at_random_moments_lose_no_answer_that_a_checkpoint_keeps(
    tmp_path: Path, launcher: RunLauncher, name: str, bound: int
) -> None:
    asked, out, rng = MANIFESTS[name](tmp_path, bound), str(tmp_path / "out"), random.Random(bound)
    store, kept = open_store(out), []
    for number in range(3):
        done = newest_step(store)
        pid = launcher.start(asked, out)
        until_newer(store, done)
        time.sleep(rng.uniform(0, 0.5))
        # A stop keeps what was sampled until then; a kill, what the newest checkpoint holds.
        with suppress(ProcessLookupError):  # it may have done its last step meanwhile
            os.kill(pid, signal.SIGTERM if number == 1 else signal.SIGKILL)
        code = launcher.wait()
        kept.append(newest(store))
        if code == 0:
            break
        assert code in (-signal.SIGKILL, 75)
    assert launcher.run(asked, out) == 0
    assert check_kept(store, name, kept), "no checkpoint kept an answer: the test shows nothing"
