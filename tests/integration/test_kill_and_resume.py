"""kill -9 at any moment costs nothing: rows and adapter equal those of a run that was left alone, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from orbit_runtime.storage import open_store
from tests.integration.killing import kill_until_done, small_manifest, timeless_rows
from tests.integration.run_nursery import Nursery


@pytest.mark.timeout(600)  # twelve starts: a machine that is busy with something else may take minutes
@pytest.mark.parametrize(
    ("adapter", "every_steps", "kills", "steps"),
    [("LoRA", 1, 10, 44), ("OFT", 3, 5, 24)],
    ids=["LoRA, ten", "OFT, five"],
)
def test_kills_change_no_bit(
    tmp_path: Path, nursery: Nursery, adapter: str, every_steps: int, kills: int, steps: int
) -> None:
    manifest = small_manifest(steps=steps, adapter=adapter, every_steps=every_steps)
    started = time.monotonic()
    assert nursery.run(manifest, str(tmp_path / "alone")) == 0
    undisturbed = time.monotonic() - started
    kill_until_done(nursery, manifest, str(tmp_path / "killed"), kills=kills, seed=every_steps, alone=undisturbed)
    alone, killed = open_store(str(tmp_path / "alone")), open_store(str(tmp_path / "killed"))
    assert timeless_rows(killed) == timeless_rows(alone)
    report, expected = (json.loads(store.get("report.json")) for store in (killed, alone))
    assert report["adapter_digest"] == expected["adapter_digest"]
    assert report["base_digest_before"] == report["base_digest_after"] == expected["base_digest_before"]
    assert report["publishes"] == report["publishes_proven"] > steps
    assert report["executions"] == kills + 1
    assert kills // 2 <= report["resumed"] <= kills, "an execution that saved after another had saved resumed from it"
    for step in (1, steps // 2, steps):
        name = f"rollouts/step-{step:06d}.jsonl.zst"
        assert killed.get(name) == alone.get(name), "a recorded batch is the same batch"


def test_sigterm_finishes_the_step_and_the_same_command_continues(tmp_path: Path, nursery: Nursery) -> None:
    manifest = small_manifest(steps=25, every_steps=1000)
    assert nursery.run(manifest, str(tmp_path / "alone")) == 0
    out = str(tmp_path / "stopped")
    pid = nursery.start(manifest, out)
    store = open_store(out)
    while not store.exists("metrics/step-000005.json"):
        time.sleep(0.02)
    os.kill(pid, signal.SIGTERM)
    assert nursery.wait() == 75
    newest = json.loads(store.get("report.json"))
    assert newest["status"] == "stopped"
    assert 5 <= newest["steps"] < 25
    assert newest["last_checkpoint"].rstrip("/").endswith(f"{newest['steps']:06d}")
    assert newest["base_digest_after"] == newest["base_digest_before"]
    assert nursery.run(manifest, out) == 0
    assert timeless_rows(store) == timeless_rows(open_store(str(tmp_path / "alone")))


def test_a_finished_run_started_again_does_nothing_and_more_steps_continue_it(tmp_path: Path, nursery: Nursery) -> None:
    out, alone = str(tmp_path / "grown"), str(tmp_path / "alone")
    assert nursery.run(small_manifest(steps=4), out) == 0
    before = open_store(out).get("metrics.jsonl")
    assert nursery.run(small_manifest(steps=4), out) == 0
    assert open_store(out).get("metrics.jsonl") == before
    assert nursery.run(small_manifest(steps=9), out) == 0
    assert nursery.run(small_manifest(steps=9), alone) == 0
    assert timeless_rows(open_store(out)) == timeless_rows(open_store(alone))


def test_another_seed_is_another_run(tmp_path: Path, nursery: Nursery) -> None:
    out = str(tmp_path / "run")
    assert nursery.run(small_manifest(steps=2), out) == 0
    assert nursery.run(small_manifest(steps=2, seed=1), out) == 73
