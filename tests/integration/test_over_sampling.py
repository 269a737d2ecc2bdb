"""`rollout.overSampling`: a step trains the groups that end first, and what became of the others is told."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.data.records import decompress_rollouts
from orbit_runtime.loop import run
from orbit_runtime.loop.replay import replay
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage import Store, open_store
from orbit_runtime.types import Rollout
from tests.integration.killing import small_manifest
from tests.integration.run_launcher import RunLauncher
from tests.integration.test_asynchrony import newest, until_newer

STEPS, PROMPTS, EXTRA, GROUP = 5, 4, 3, 4
pytestmark = pytest.mark.timeout(1200)


def manifest(max_staleness: int, over_sampling: int = EXTRA, **sampling: Any) -> dict[str, Any]:
    made = small_manifest(steps=STEPS)
    made["spec"]["rollout"] = {
        "maxStaleness": max_staleness, "overSampling": over_sampling, "sampling": {"maxNewTokens": 24, **sampling},
    }  # fmt: skip
    return made


def trained(store: Store) -> dict[int, list[Rollout]]:
    keys = sorted(key for key in store.list("rollouts/") if key.endswith(".jsonl.zst"))
    found = [decompress_rollouts(store.get(key)) for key in keys]
    return {rollouts[0].step: rollouts for rollouts in found}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[str]]:
    """Prompts of each step, of a run that trains everything it draws."""
    out, asked = str(tmp_path_factory.mktemp("all")), manifest(0, 0, maxNewTokens=1)
    asked["spec"]["training"] |= {"promptsPerStep": PROMPTS + EXTRA, "miniBatchPrompts": None}
    run(OrbitRun.model_validate(asked), out=out, progress=SilentProgress())
    return {step: [each.prompt_id for each in all_[::GROUP]] for step, all_ in trained(open_store(out)).items()}


def check_trained(store: Store, drawn: dict[int, list[str]]) -> None:
    """Whole groups, as many as a step trains, of its own prompts and in their order."""
    found = trained(store)
    assert sorted(found) == list(range(1, STEPS + 1))
    for step, rollouts in found.items():
        names = [each.prompt_id for each in rollouts[::GROUP]]
        assert names == [name for name in drawn[step] if name in names]
        assert [(each.prompt_id, each.sample_index) for each in rollouts] == [
            (name, sample) for name in names for sample in range(GROUP)
        ]
        assert len(names) == PROMPTS


@pytest.mark.parametrize("max_staleness", [0, pytest.param(2, marks=pytest.mark.long)])
def test_the_first_groups_train_the_others_are_counted_and_a_replay_has_the_same_bits(
    tmp_path: Path, drawn: dict[int, list[str]], max_staleness: int
) -> None:
    run(OrbitRun.model_validate(manifest(max_staleness)), out=str(tmp_path), progress=SilentProgress())
    store = open_store(str(tmp_path))
    check_trained(store, drawn)
    rows = [json.loads(line) for line in store.get("metrics.jsonl").splitlines()]
    assert [row["prompts_cancelled"] for row in rows] == [EXTRA] * STEPS
    assert [row["groups"] for row in rows] == [PROMPTS] * STEPS
    assert sum(row["tokens_cancelled"] for row in rows) > 0
    assert all(row["tokens_cancelled"] <= EXTRA * GROUP * 24 for row in rows)
    assert max(row["staleness_max"] for row in rows) <= max_staleness
    again = replay(store, steps=None, show=lambda _done, _total: None)
    assert again.is_equal
    assert len(again.steps) == STEPS


def test_dynamic_sampling_draws_more_in_each_round(tmp_path: Path) -> None:
    asked = manifest(0)
    asked["spec"]["algorithm"]["dynamicSampling"] = {"maxRounds": 2}
    asked["spec"]["training"]["steps"] = 2
    run(OrbitRun.model_validate(asked), out=str(tmp_path), progress=SilentProgress())
    rows = [json.loads(line) for line in open_store(str(tmp_path)).get("metrics.jsonl").splitlines()]
    for row in rows:
        rounds, rest = divmod(row["prompts_cancelled"], EXTRA)
        assert rest == 0
        assert 1 <= rounds <= 3
        assert (row["groups"] > PROMPTS) == (rounds > 1)


@pytest.mark.long
def test_a_stop_keeps_which_groups_were_chosen_and_a_kill_loses_none_of_them(
    tmp_path: Path, drawn: dict[int, list[str]], launcher: RunLauncher
) -> None:
    asked, out = manifest(2), str(tmp_path)
    store = open_store(out)
    pid = launcher.start(asked, out)
    until_newer(store, 1)
    os.kill(pid, signal.SIGKILL)
    launcher.wait()
    killed = newest(store)
    pid = launcher.start(asked, out)
    until_newer(store, killed[0])
    os.kill(pid, signal.SIGTERM)
    launcher.wait()
    stopped = newest(store)
    assert launcher.run(asked, out) == 0
    check_trained(store, drawn)
    found = trained(store)
    seen = 0
    for _, kept in (killed, stopped):
        for step in {each.step for each in kept}:
            by_name = {(each.prompt_id, each.sample_index): each for each in found[step]}
            of_step = [each for each in kept if each.step == step]
            ended = [each for each in of_step if each.played is not None]
            names = {each.name[0] for each in ended}
            whole = {name for name in names if sum(each.name[0] == name for each in ended) == GROUP}
            for each in of_step:
                name = (each.name[0], each.name[2])
                if each.cancelled is not None:
                    assert name not in by_name, "what was cancelled does not train"
                elif each.played is not None and each.name[0] in whole:
                    assert by_name[name] == each.played.rollout, "what had ended trains, as it was"
                seen += 1
    assert seen, "no checkpoint kept anything: the test shows nothing"
