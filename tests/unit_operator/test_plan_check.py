"""What the planner says of a manifest before a pod is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kopf", reason="the operator's packages are not installed (extra `operator`)")
from unit_operator.cluster_model import build_cluster

from orbit_operator.observe import judge_manifest
from orbit_operator.plan import plan
from orbit_operator.plan_check import check_plan
from orbit_runtime.spec import OrbitRun, load_manifest

EXAMPLES = Path(__file__).parents[2] / "examples"
LARGE = "hf://Qwen/Qwen3-235B-A22B"


def build_run(**changes: dict[str, Any]) -> OrbitRun:
    manifest = load_manifest(EXAMPLES / "qwen3-235b-a22b.yaml").to_manifest()
    spec = {**manifest["spec"]}
    for block, fields in changes.items():
        spec[block] = {**spec.get(block, {}), **fields}
    return OrbitRun.model_validate({**manifest, "spec": spec})


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_no_example_is_refused(path: Path) -> None:
    status, reason, message = check_plan(load_manifest(path))
    assert status != "False", (reason, message)


def test_what_does_not_fit_is_refused_with_the_number_and_the_fix() -> None:
    status, reason, message = check_plan(build_run(placement={"gpuProduct": "NVIDIA-GeForce-RTX-4090"}))
    assert (status, reason) == ("False", "DoesNotFit")
    assert "GiB" in message
    assert ";" in message


def test_the_memory_that_the_pod_asks_for_is_planned_with() -> None:
    status, reason, message = check_plan(build_run(placement={"resources": {"memory": "1Gi"}}))
    assert (status, reason) == ("False", "DoesNotFit")
    assert message.startswith("spec.placement.resources.memory: the run needs 88.9 GiB")


def test_a_precision_that_is_not_the_checkpoints_is_refused_by_its_field() -> None:
    status, reason, message = check_plan(build_run(model={"precision": "MXFP4"}))
    assert (status, reason) == ("False", "ModelMismatch")
    assert message.startswith("spec.model.precision")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"placement": {"gpuProduct": None}}, "gpuProduct"),
        ({"placement": {"gpuProduct": "Some-Other-GPU"}}, "no GPU that the planner knows"),
        ({"placement": {"gpus": 0}}, "without GPUs"),
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


def test_a_manifest_of_another_version_is_told_and_not_planned() -> None:
    manifest = build_run().to_manifest()
    metadata = {"name": "a", "namespace": "team", "uid": "u"}
    judged = judge_manifest({"metadata": metadata, "spec": {**manifest["spec"], "novelty": 1}})
    assert judged.invalid.startswith("spec.novelty")
    assert judged.plan[0] == "Unknown"
