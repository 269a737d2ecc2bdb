"""What the planner says of a manifest before a pod is made."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kopf", reason="the operator's packages are not installed (extra `operator`)")
from unit_operator.cluster_model import build_cluster

from orbit_operator.manifests.config_map import build_config_map
from orbit_operator.observe import build_source, check_plan, judge_manifest
from orbit_operator.plan import plan
from orbit_runtime.api.checks import check_before_run, find_facts
from orbit_runtime.cli.plan import find_machine
from orbit_runtime.errors import UnsupportedError
from orbit_runtime.planner import judge
from orbit_runtime.spec import OrbitRun, load_manifest

EXAMPLES = Path(__file__).parents[2] / "examples"
LARGE = "hf://Qwen/Qwen3-235B-A22B"


def build_run(**changes: dict[str, Any]) -> OrbitRun:
    manifest = load_manifest(EXAMPLES / "qwen3-235b-a22b.yaml").to_manifest()
    spec = {**manifest["spec"]}
    for block, fields in changes.items():
        spec[block] = {**spec.get(block, {}), **fields}
    return OrbitRun.model_validate({**manifest, "spec": spec})


def with_machine(run: OrbitRun, product: str | None, gpus: int, memory: str) -> OrbitRun:
    manifest = run.to_manifest()
    placement = {**manifest["spec"]["placement"], "gpus": gpus, "resources": {"memory": memory}}
    placement.pop("gpuProduct", None)
    manifest["spec"]["placement"] = placement | ({"gpuProduct": product} if product else {})
    return OrbitRun.model_validate(manifest)


@pytest.mark.parametrize(
    ("product", "driver", "gpus"),
    [
        (None, "", 0),
        ("NVIDIA-GeForce-RTX-4090", "NVIDIA GeForce RTX 4090, 24564", 1),
        ("NVIDIA-H100-80GB-HBM3", "NVIDIA H100 80GB HBM3, 81559", 1),
        ("NVIDIA-H100-80GB-HBM3", "NVIDIA H100 80GB HBM3, 81559", 8),
        ("NVIDIA-B200", "NVIDIA B200, 183359", 1),
        ("NVIDIA-B200", "NVIDIA B200, 183359", 8),
    ],
)
def test_plan_run_and_operator_give_one_verdict_on_one_machine(
    product: str | None, driver: str, gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every example. `nvidia-smi` is played: there is no GPU here."""
    played = tmp_path / "nvidia-smi"
    played.write_text("#!/bin/sh\n" + f"echo '{driver}'\n" * gpus)
    played.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("orbit_runtime.api.machine.usable_memory", lambda: 2 * 2**40)
    seen = set()
    for path in sorted(EXAMPLES.glob("*.yaml")):
        run = with_machine(load_manifest(path), product, gpus, "2Ti")
        own = judge(run, find_facts(run, path.parent), find_machine(run, None))
        status, reason, _ = check_plan(run)
        with nullcontext() if own.accepted else pytest.raises(UnsupportedError):
            check_before_run(run, path.parent)
        assert (status, reason) == ({True: "True", False: "False"}[bool(own.accepted)], own.reason), path.stem
        seen.add(status)
    assert "True" in seen


def test_a_flagship_that_no_trainer_of_this_version_can_run_gets_no_job() -> None:
    run = with_machine(load_manifest(EXAMPLES / "deepseek-v4-flash.yaml"), "NVIDIA-H100-80GB-HBM3", 8, "2Ti")
    status, reason, message = check_plan(run)
    assert (status, reason) == ("False", "NotInThisVersion")
    assert message.startswith("spec.training.trainer: this version does not divide the attention of DeepSeek-V4")
    cluster = build_cluster()
    chosen = plan(cluster.run, cluster.observe(), cluster.now, cluster.limits, (status, reason, message))
    assert chosen.actions == ()


def test_what_does_not_fit_is_refused_with_the_number_and_the_fix() -> None:
    status, reason, message = check_plan(build_run(placement={"gpuProduct": "NVIDIA-GeForce-RTX-4090"}))
    assert (status, reason) == ("False", "DoesNotFit")
    assert "GiB" in message
    assert ";" in message


def test_the_memory_that_the_pod_asks_for_is_planned_with() -> None:
    run = with_machine(load_manifest(EXAMPLES / "qwen3-4b.yaml"), "NVIDIA-H100-80GB-HBM3", 1, "1Gi")
    status, reason, message = check_plan(run)
    assert (status, reason) == ("False", "DoesNotFit")
    assert message.startswith("spec.placement.resources.memory: the run needs 4.")


def test_a_precision_that_is_not_the_checkpoints_is_refused_by_its_field() -> None:
    status, reason, message = check_plan(build_run(model={"precision": "MXFP4"}))
    assert (status, reason) == ("False", "ModelMismatch")
    assert message.startswith("spec.model.precision")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"placement": {"gpuProduct": None}}, "gpuProduct"),
        ({"placement": {"gpuProduct": "Some-Other-GPU"}}, "is not a GPU that the planner knows"),
        ({"placement": {"gpus": 0, "gpuProduct": None}}, "placement.resources.memory is not set"),
        ({"model": {"uri": "hf://nobody/knows@main"}}, "no facts"),
        ({"model": {"uri": "s3://models/own"}}, "no facts"),
        ({"model": {"uri": "builtin://never-heard-of", "precision": "Auto"}}, "never-heard-of"),
    ],
)
def test_where_too_little_is_known_the_pod_plans(changes: dict[str, Any], word: str) -> None:
    status, reason, message = check_plan(build_run(**changes))
    assert (status, reason) == ("Unknown", "PlannerUnavailable")
    assert word in message


def test_a_run_that_is_refused_fails_without_a_pod_and_says_who_must_act() -> None:
    cluster = build_cluster()
    no = ("False", "DoesNotFit", "300 GiB too much")
    chosen = plan(cluster.run, cluster.observe(), cluster.now, cluster.limits, no)
    assert chosen.actions == ()
    assert chosen.state is not None
    assert (chosen.state.phase, chosen.state.reason, chosen.state.owner) == ("Failed", "DoesNotFit", "user")
    assert [(event.reason, event.is_warning) for event in chosen.events] == [("RunFailed", True)]


def test_a_stored_run_with_a_transport_that_is_gone_goes_on_by_memory() -> None:
    spec = build_run(rollout={"engine": "SGLang"}).to_manifest()["spec"]
    spec["rollout"]["adapterTransport"] = "Broadcast"
    body = {"metadata": {"name": "a", "namespace": "team", "uid": "u"}, "spec": spec}
    assert judge_manifest(body).invalid == ""
    written = json.loads(build_config_map(build_source(body))["data"]["run.yaml"])
    assert written["spec"]["rollout"]["adapterTransport"] == "SharedMemory"


def test_a_manifest_of_another_version_is_told_and_not_planned() -> None:
    manifest = build_run().to_manifest()
    metadata = {"name": "a", "namespace": "team", "uid": "u"}
    judged = judge_manifest({"metadata": metadata, "spec": {**manifest["spec"], "novelty": 1}})
    assert judged.invalid.startswith("spec.novelty")
    assert judged.plan[0] == "Unknown"
