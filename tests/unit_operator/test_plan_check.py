"""The planner's answer in `PlanAccepted`: the same as `orbit plan`'s, without a pod where it is no."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orbit_operator.actions import CreateAttempt
from orbit_operator.facts import Observed, RunFacts
from orbit_operator.manifests.source import RunSource
from orbit_operator.plan import Limits, plan
from orbit_operator.plan_check import PlanCheck, check_plan
from orbit_operator.reconcile import ask_planner
from orbit_runtime.cli.plan import find_machine
from orbit_runtime.errors import UnsupportedError
from orbit_runtime.model_info.cards import find_card_facts
from orbit_runtime.planner import check_fits
from orbit_runtime.planner import plan as runtime_plan
from orbit_runtime.spec import OrbitRun, load_manifest

EXAMPLES = Path(__file__).parents[2] / "examples"
FLAGSHIPS = ("kimi-k2-6", "deepseek-v4-flash", "deepseek-v4-pro", "qwen3-235b-a22b", "qwen3-30b-a3b", "qwen3-4b")
H100 = "placement.gpuProduct=NVIDIA-H100-80GB-HBM3"


def manifest(name: str, *overrides: str) -> OrbitRun:
    return load_manifest(EXAMPLES / f"{name}.yaml", [f"spec.{each}" for each in overrides])


def source(run: OrbitRun) -> RunSource:
    spec = run.model_dump(mode="json", by_alias=True)["spec"]
    return RunSource("ml", run.name, "u-1", spec, run)


def body(run: OrbitRun) -> dict[str, Any]:
    metadata = {"name": run.name, "namespace": "ml", "uid": "u-1", "generation": 1}
    return {"metadata": metadata, "spec": source(run).spec}


@pytest.mark.parametrize("name", FLAGSHIPS)
def test_every_flagship_is_accepted_with_what_its_fullest_gpu_holds(name: str) -> None:
    status, reason, message = check_plan(manifest(name))
    assert (status, reason) == ("True", "Fits")
    run = manifest(name)
    facts = find_card_facts(run.spec.model.uri)
    assert facts is not None
    made = runtime_plan(run, facts, find_machine(run, None))
    assert f"at most {max(map(made.total, made.phases)) / 2**30:.1f} of" in message


def test_the_refusal_is_that_of_the_command_line() -> None:
    run = manifest("kimi-k2-6", H100)
    facts = find_card_facts(run.spec.model.uri)
    assert facts is not None
    with pytest.raises(UnsupportedError) as refused:
        check_fits(runtime_plan(run, facts, find_machine(run, None)))
    status, reason, message = check_plan(run)
    assert (status, reason) == ("False", "Unsupported")
    assert refused.value.message in message
    assert "one H100 has 79.1" in message
    assert refused.value.fix is not None
    assert refused.value.fix in message


def test_a_run_that_does_not_fit_gets_no_pod_and_ends() -> None:
    run = RunFacts("ml", "kimi-k2-6", "u-1")
    for overrides, outcome in (((H100,), False), ((), None)):
        answer = ask_planner(run, body(manifest("kimi-k2-6", *overrides)), PlanCheck())
        chosen = plan(run, Observed(is_new=True), 100.0, Limits(), answer)
        assert chosen.state is not None
        assert chosen.state.outcome is outcome
        assert any(isinstance(action, CreateAttempt) for action in chosen.actions) is (outcome is None)
        if outcome is False:
            assert (chosen.state.reason, chosen.state.owner) == ("Unsupported", "user")
            assert "GiB too much" in chosen.state.message


def test_another_precision_than_the_checkpoint_s_is_the_manifest_s_mistake() -> None:
    status, reason, message = check_plan(manifest("kimi-k2-6", "model.precision=NVFP4"))
    assert (status, reason) == ("False", "ValidationFailed")
    assert "is INT4, not NVFP4" in message


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (("model.uri=s3://bucket/model",), "s3://bucket/model"),
        (("model.uri=hf://nobody/knows",), "hf://nobody/knows"),
        (("placement.gpuProduct=NVIDIA-Potato",), "NVIDIA-Potato"),
        (("placement.gpuProduct=null",), "spec.placement.gpuProduct"),
    ],
)
def test_without_facts_the_pod_is_left_to_find_out(overrides: tuple[str, ...], word: str) -> None:
    status, reason, message = check_plan(manifest("qwen3-4b", *overrides))
    assert (status, reason) == ("Unknown", "PlannerUnavailable")
    assert word in message


def test_the_shipped_model_on_the_cpu_is_judged_by_its_memory() -> None:
    assert check_plan(manifest("quickstart", "placement.gpus=0"))[0] == "True"
    little = check_plan(manifest("quickstart", "placement.gpus=0", "placement.resources.memory=64Mi"))
    assert little[:2] == ("False", "Unsupported")


def test_an_answer_is_made_once_for_each_version_of_a_run() -> None:
    plans, run = PlanCheck(), manifest("kimi-k2-6")
    assert plans.ask(source(run), 1) is plans.ask(source(run), 1)
    changed = source(manifest("kimi-k2-6", H100))
    assert plans.ask(changed, 1)[0] == "True", "the same version: not asked again"
    assert plans.ask(changed, 2)[0] == "False"


def test_a_manifest_that_cannot_be_read_is_not_planned() -> None:
    run = replace(RunFacts("ml", "r", "u-1"), invalid="spec.model: no")
    assert ask_planner(run, {"metadata": {}}, PlanCheck())[:2] == ("Unknown", "ValidationFailed")
