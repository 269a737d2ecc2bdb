"""What a container sees of its machine. `nvidia-smi` is played: there is no GPU here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orbit_runtime.api import checks
from orbit_runtime.api.checks import check_before_run, find_server_gpus
from orbit_runtime.api.machine import this_machine, usable_memory
from orbit_runtime.errors import ManifestError, UnsupportedError
from orbit_runtime.model_info.cards import card_facts
from orbit_runtime.spec import OrbitRun, load_manifest
from orbit_runtime.workers.servers.process import AGENT_VARIABLE

ROOT = Path(__file__).parents[3]
MODEL = "Qwen/Qwen3-4B"


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a pod with eight."""
    played = tmp_path / "nvidia-smi"
    played.write_text("#!/bin/sh\nfor each in 1 2 3 4; do echo 'NVIDIA H100 80GB HBM3, 81559'; done\n")
    played.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(checks, "find_facts", lambda *_: card_facts(MODEL))


def split_run() -> OrbitRun:
    manifest = load_manifest(ROOT / "examples/qwen3-4b.yaml").to_manifest()
    manifest["spec"]["model"]["precision"] = "BF16"
    manifest["spec"]["rollout"]["engine"] = "SGLang"
    manifest["spec"]["placement"] |= {"layout": "Split", "gpus": 8}
    return OrbitRun.model_validate(manifest)


@pytest.mark.usefixtures("four_gpus")
def test_of_a_split_pod_a_container_sees_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AGENT_VARIABLE, raising=False)
    placement = split_run().spec.placement
    assert (this_machine(placement).num_gpus, this_machine(placement).host_bytes) == (4, usable_memory())
    monkeypatch.setenv(AGENT_VARIABLE, "http://127.0.0.1:9401")
    whole = this_machine(placement)
    assert (whole.num_gpus, whole.host_bytes) == (8, 2 * (usable_memory() or 0))


@pytest.mark.usefixtures("four_gpus")
def test_servers_of_a_split_pod_get_its_other_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AGENT_VARIABLE, "http://127.0.0.1:9401")
    assert find_server_gpus(split_run(), card_facts(MODEL)) == 4
    manifest = split_run().to_manifest()
    manifest["spec"]["rollout"]["replicas"] = 5
    with pytest.raises(UnsupportedError, match="more than the 4 available to servers"):
        find_server_gpus(OrbitRun.model_validate(manifest), card_facts(MODEL))


@pytest.mark.usefixtures("four_gpus")
def test_before_a_run_trainer_and_engine_of_a_split_pod_are_judged_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = []
    monkeypatch.setattr("orbit_runtime.planner.check_verdict", lambda verdict: made.append(verdict.plan))
    monkeypatch.setenv(AGENT_VARIABLE, "http://127.0.0.1:9401")
    check_before_run(split_run(), tmp_path)
    monkeypatch.delenv(AGENT_VARIABLE)
    told = check_before_run(split_run(), tmp_path)
    colocated = split_run().to_manifest()
    colocated["spec"]["placement"]["layout"] = "Colocated"
    check_before_run(OrbitRun.model_validate(colocated), tmp_path)
    pod, machine, shared = made
    for split in (pod, machine):
        assert split.layout.num_gpus == shared.layout.num_gpus == 1
        assert "KV cache" not in split.phases["train"]
        assert "optimizer" not in split.phases["rollout"]
        assert split.total("train") < shared.total("train"), "on one GPU both stand at once"
    assert any(note.startswith("3 of 8 GPUs are idle (1, 2, 3): one is enough") for note in pod.notes)
    assert any(note.startswith("1 of 4 GPUs are idle") for note in machine.notes)
    assert [note.partition(" (")[0] for note in told] == ["1 of 4 GPUs are idle"], "a run tells it as it starts"


@pytest.mark.usefixtures("four_gpus")
def test_what_no_trainer_can_run_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "find_facts", lambda *_: card_facts("Qwen/Qwen3-30B-A3B-FP8"))
    overrides = ["spec.training.trainer=Megatron", "spec.training.parallel={pipeline: 64}"]
    run = load_manifest(ROOT / "examples/qwen3-30b-a3b.yaml", overrides)
    with pytest.raises(UnsupportedError, match="48 layers cannot be divided into 64 stages") as caught:
        check_before_run(run, tmp_path)
    assert (caught.value.exit_code, caught.value.where) == (78, "spec.training.parallel")


@pytest.mark.usefixtures("four_gpus")
def test_a_fault_of_the_planner_is_no_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("orbit_runtime.planner.verdict.plan", breaks)
    with pytest.raises(KeyError):
        check_before_run(split_run(), tmp_path)


@pytest.mark.usefixtures("four_gpus")
def test_a_manifest_that_contradicts_the_model_does_not_start(tmp_path: Path) -> None:
    manifest = split_run().to_manifest()
    manifest["spec"]["model"]["precision"] = "MXFP4"
    with pytest.raises(ManifestError, match="the manifest says MXFP4, the checkpoint is BF16"):
        check_before_run(OrbitRun.model_validate(manifest), tmp_path)
