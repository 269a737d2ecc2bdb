"""The guide's best-of-n, tree and self-play in runs: what trains, what is counted, killed and resumed, and replayed."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.loop import run
from orbit_runtime.loop.replay import replay
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage import Store, open_store
from orbit_runtime.types import Rollout
from tests.integration.killing import small_manifest
from tests.integration.run_launcher import RunLauncher
from tests.integration.test_asynchrony import trained, until_newer

GUIDE = Path(__file__).resolve().parents[2] / "docs/guides/environments.md"
STEPS, PROMPTS = 3, 3
pytestmark = pytest.mark.timeout(900)


def manifest(folder: Path, name: str, group_size: int, **arguments: Any) -> dict[str, Any]:
    """A run of one of the guide's classes."""
    code = folder / "code"
    code.mkdir(exist_ok=True)
    (code / "my_searches.py").write_text(re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[2])
    made = small_manifest(steps=STEPS)
    made["spec"]["algorithm"] = {"groupSize": group_size}
    made["spec"]["environment"] = {
        "type": "MultiTurn", "entrypoint": f"my_searches:{name}", "arguments": arguments,
        "rewards": [{"name": "correct", "type": "ExactMatch"}] if name == "Tree" else [],
        "code": {"uri": str(code)},
    }  # fmt: skip
    made["spec"]["rollout"]["sampling"]["maxNewTokens"] = 12
    made["spec"]["training"] |= {"promptsPerStep": PROMPTS, "miniBatchPrompts": 1}
    return made


@pytest.mark.parametrize(
    ("name", "group_size", "arguments"), [("BestOf", 4, {"width": 3}), ("Tree", 12, {}), ("Nim", 4, {})]
)
def test_rows_and_rollouts_tell_what_trained_and_what_did_not(
    tmp_path: Path, name: str, group_size: int, arguments: dict[str, Any]
) -> None:
    out = str(tmp_path / "out")
    run(OrbitRun.model_validate(manifest(tmp_path, name, group_size, **arguments)), out=out, progress=SilentProgress())
    store = open_store(out)
    rows = [json.loads(line) for line in store.get("metrics.jsonl").splitlines()]
    for row, rollouts in zip(rows, trained(store).values(), strict=True):
        assert len(rollouts) == PROMPTS * group_size
        assert [each.sample_index for each in rollouts] == [*range(group_size)] * PROMPTS
        assert (row["groups"], row["reward_value"]) == (PROMPTS, len(rollouts))
        assert row["tokens"] == sum(sum(each.loss_mask_T) for each in rollouts)
        assert row["tokens_unchosen"] == sum(each.counts.get("tokens_unchosen", 0) for each in rollouts)
        assert (row["tokens_unchosen"] > 0) == (name == "BestOf")
        assert row["parity_max"] < 1e-3
    if name == "Tree":
        assert [each.cohort for each in trained(store)[1][:12]] == (["first"] * 2 + ["second"] * 4) * 2
        assert all({*each.reward_parts} == {"environment", "correct"} for each in trained(store)[1])
    if name == "Nim":
        games = zip(trained(store)[1][::2], trained(store)[1][1::2], strict=True)
        assert all({begins.reward, follows.reward} == {0.0, 1.0} for begins, follows in games)
    # The small model knows no game: whoever begins has lost, and nobody is better than the others of the cohort.
    assert any(row["grad_norm"] > 0 for row in rows) == (name != "Nim")
    assert replay(store, steps=None, show=lambda _done, _total: None).is_equal


@pytest.mark.long
def test_a_killed_and_resumed_search_is_the_straight_one(tmp_path: Path, launcher: RunLauncher) -> None:
    asked = manifest(tmp_path, "Tree", 6)
    killed, straight = str(tmp_path / "killed"), str(tmp_path / "straight")
    pid = launcher.start(asked, killed)
    until_newer(open_store(killed), 0)
    os.kill(pid, signal.SIGKILL)
    assert launcher.wait() == -signal.SIGKILL
    assert launcher.run(asked, killed) == 0
    assert launcher.run(asked, straight) == 0
    # When a branch asks depends on its process, hence what it is computed together with, hence the last bits.
    for one, other in zip(*(everything(open_store(out)) for out in (killed, straight)), strict=True):
        assert replace(one, logprobs_T=other.logprobs_T) == other
        assert one.logprobs_T.tolist() == pytest.approx(other.logprobs_T.tolist(), abs=1e-4)


def everything(store: Store) -> list[Rollout]:
    return [rollout for rollouts in trained(store).values() for rollout in rollouts]
