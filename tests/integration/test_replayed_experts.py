"""A whole run whose trainer sends tokens to the experts that rollout chose, and its replay from what was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.cli.main import run_command
from orbit_runtime.data.records import decompress_rollouts
from orbit_runtime.data.routing import unpack_experts
from tests.integration.killing import small_manifest
from tests.integration.run_launcher import RunLauncher
from tests.integration.tiny_families import make_family

STEPS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("model"), "qwen3_moe", "INT4")[0]


def manifest_of(model: Path, replay: str) -> dict[str, Any]:
    manifest = small_manifest(steps=STEPS)
    manifest["spec"]["model"]["uri"] = str(model)
    manifest["spec"]["rollout"]["routerReplay"] = replay
    manifest["spec"]["algorithm"]["kl"] = {"coefficient": 0.1, "placement": "Reward"}
    return manifest


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("replay", ["Record", "Replay"])
def test_a_run_records_experts_measures_both_parities_and_is_replayed_bit_for_bit(
    model: Path, launcher: RunLauncher, tmp_path: Path, capsys: pytest.CaptureFixture[str], replay: str
) -> None:
    out = tmp_path / "run"
    assert launcher.run(manifest_of(model, replay), str(out)) == 0
    for row in rows(out):
        # In fp32 both sides choose alike but for near ties.
        assert row["router_agreement"] > 0.99
        assert row["parity_mean_replayed"] < 1e-4
        assert row["parity_mean_unreplayed"] < 1e-2
    for step in range(1, STEPS + 1):
        for rollout in decompress_rollouts((out / "rollouts" / f"step-{step:06d}.jsonl.zst").read_bytes()):
            assert rollout.routed_experts is not None
            assert unpack_experts(rollout.routed_experts).shape == (len(rollout.token_ids_T) - 1, 2, 2)
    capsys.readouterr()
    assert run_command(["replay", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["equal"] is True


def test_without_it_nothing_is_recorded(model: Path, launcher: RunLauncher, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert launcher.run(manifest_of(model, "None"), str(out)) == 0
    assert [row["router_agreement"] for row in rows(out)] == [None] * STEPS
    (first, *_) = decompress_rollouts((out / "rollouts" / "step-000001.jsonl.zst").read_bytes())
    assert first.routed_experts is None


def test_a_model_without_routed_experts_is_refused_by_field(launcher: RunLauncher, tmp_path: Path) -> None:
    manifest = small_manifest(steps=1)
    manifest["spec"]["rollout"]["routerReplay"] = "Replay"
    out = tmp_path / "run"
    assert launcher.run(manifest, str(out)) == 78
