"""A plan that fits is one that every builder of flags accepts; what `orbit validate` refuses, plan and run refuse too.

Excepted: packages that are not installed, what servers answer, and the values of tensors.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from orbit_runtime.api.checks import local_facts
from orbit_runtime.errors import OrbitError, UnsupportedError
from orbit_runtime.model_info.checkpoint import Headers, headers_facts
from orbit_runtime.model_info.weights import ModelFacts
from orbit_runtime.planner import Machine, Plan, Verdict, judge
from orbit_runtime.planner.job import build_job, requested_machine
from orbit_runtime.planner.serving import check_servers
from orbit_runtime.planner.support.combinations import Combination, find_support
from orbit_runtime.planner.support.kernels import choose_kernels, expert_layouts
from orbit_runtime.planner.support.manifests import (
    ManifestFacts,
    check_engine,
    check_manifest,
    check_teacher_sampling,
    check_token_ids,
)
from orbit_runtime.planner.support.served import LORA_LAYOUTS, Place, check_served, served_experts
from orbit_runtime.planner.verdict import check_support
from orbit_runtime.policy.facts import PolicyFacts
from orbit_runtime.rollout.sglang_server import ServerSettings, lora_targets, server_arguments, server_variables
from orbit_runtime.sides.checkpoint_facts import facts_of_headers
from orbit_runtime.sides.trainers import adapter_config, check_replay
from orbit_runtime.spec import OrbitRun, load_manifest
from orbit_runtime.spec.engine_arguments import argument_flags
from orbit_runtime.training.megatron.groups import GroupSizes
from tests.unit_runtime.planner.drawn_cases import LAYOUTS, draw_headers, draw_machine, draw_run, headers_of

EXAMPLES = Path(__file__).parents[3] / "examples"


FACTS: dict[str, ModelFacts] = {}
"""Those of each checkpoint, by its place: reading headers takes longer than planning."""


def facts_of(headers: Headers) -> ModelFacts:
    if headers.place not in FACTS:
        FACTS[headers.place] = headers_facts(headers, headers.place)
    return FACTS[headers.place]


def build_flags(run: OrbitRun, facts: PolicyFacts | None, model: ModelFacts, machine: Machine, made: Plan) -> None:
    """What a run does with a plan that fits, up to the command lines of its servers and the sizes of its ranks.

    Args:
        facts: of the policy; None if there is no adapter.
    """
    spec = run.spec
    check_manifest(ManifestFacts(spec))
    if made.trainer == "Megatron":
        layout = made.layout
        check_manifest(ManifestFacts(spec, trainer="Megatron"))
        GroupSizes(
            layout.num_gpus, tensor=layout.tensor, expert=layout.expert, pipeline=layout.pipeline,
            context=layout.context,
        ).check()  # fmt: skip
    if spec.algorithm.type == "SFT":
        return
    check_engine(spec, made.engine)
    check_teacher_sampling(spec)
    check_token_ids(spec, model.architecture.vocab_size)
    if facts is None or made.engine == "Torch":
        return
    check_replay(spec, facts)
    place: Place = "attached" if made.engine == "OpenAI" else "GPU" if machine.gpu else "CPU"
    capability = machine.gpu.capability if machine.gpu else None
    check_served(facts.served(place, capability=capability, deterministic=spec.rollout.deterministic))
    if place != "attached":
        settings = server_settings(run, facts, model, machine)
        server_arguments(settings, 1)
        server_variables(settings, Path("taps"))


def server_settings(run: OrbitRun, facts: PolicyFacts, model: ModelFacts, machine: Machine) -> ServerSettings:
    spec, experts = run.spec, served_experts(facts.adapter.expert_layout, facts.layers)
    job = build_job(run, machine)
    kernels = choose_kernels(
        model,
        spec.model.activation_precision,
        adapts_experts=experts in LORA_LAYOUTS,
        engine_arguments=spec.rollout.engine_arguments,
        reports_experts=spec.rollout.router_replay != "None",
    )
    return ServerSettings(
        model=Path("m"), device="cuda" if machine.gpu else "cpu", dtype="bfloat16", max_running_requests=8, seed=0,
        max_sequence_length=64, targets=lora_targets((*facts.layers, *facts.adapter.targets)), experts=experts,
        expert_formats=facts.expert_formats, kernels=kernels if machine.gpu else None,
        extra=tuple(argument_flags(spec.rollout.engine_arguments)),
        tensor_parallel=check_servers(model, job, len(job.devices.engine)),
    )  # fmt: skip


def objection(run: OrbitRun, facts: PolicyFacts | None, model: ModelFacts, machine: Machine, verdict: Verdict) -> str:
    """Why a builder of flags refuses what the plan accepted; or why plan and run accept what validate refuses."""
    try:
        check_support(run, None)
        check_support(run, model)
    except OrbitError as error:
        return f"validate alone: {error.message}" if verdict.accepted is not False else ""
    if verdict.accepted is False:
        return ""
    assert verdict.plan is not None
    try:
        build_flags(run, facts, model, machine, verdict.plan)
    except OrbitError as error:
        return f"{error.where}: {error.message}"
    return ""


@pytest.mark.timeout(600)
def test_a_plan_that_fits_is_accepted_by_every_builder_of_flags() -> None:
    random, found, reasons = Random(5), Counter[str](), Counter[str]()
    while reasons.total() < 2000:
        headers, machine = draw_headers(random), draw_machine(random)
        model = facts_of(headers)
        run = draw_run(random, model.architecture.targets())
        if run is None:
            continue
        verdict = judge(run, model, machine)
        reasons[verdict.reason] += 1
        is_whole = run.spec.adapter.type == "Full"
        facts = None if is_whole else facts_of_headers(headers, adapter_config(run.spec), "bfloat16")
        found[objection(run, facts, model, machine, verdict)] += 1
    del found[""]
    assert not found, found.most_common(3)
    assert min(reasons["Fits"], reasons["Unsupported"]) > 300, reasons


@pytest.mark.parametrize(
    ("change", "where", "says"),
    [
        ("spec.adapter.lora.alpha=48", "spec.adapter.lora.alpha", "only a power of two keeps the published values"),
        (
            "spec.adapter.targets=[q_a_proj,o_proj,gate_proj,up_proj]",
            "spec.adapter.targets",
            "of routed experts together, and down_proj has no adapter",
        ),
    ],
)
def test_experts_that_sglang_cannot_adapt_are_refused_before_half_a_terabyte_is_fetched(
    change: str, where: str, says: str
) -> None:
    run = load_manifest(EXAMPLES / "kimi-k2-6.yaml", [change])
    model, machine = local_facts(run, EXAMPLES), requested_machine(run, "B200")
    assert model is not None
    assert machine is not None
    verdict = judge(run, model, machine)
    assert (verdict.accepted, verdict.reason) == (False, "Unsupported")
    assert verdict.problem is not None
    assert verdict.problem.where == where
    assert says in verdict.problem.message
    with pytest.raises(UnsupportedError) as caught:
        check_support(run, model)
    assert caught.value.where == where


def test_fp32_is_refused_where_sglang_samples_on_gpus_and_nowhere_else() -> None:
    run = load_manifest(EXAMPLES / "kimi-k2-6.yaml", ["spec.model.computePrecision=FP32"])
    model, machine = local_facts(run, EXAMPLES), requested_machine(run, "B200")
    assert model is not None
    assert machine is not None
    problem = judge(run, model, machine).problem
    assert problem is not None
    assert problem.where == "spec.model.computePrecision"
    asked = Combination("BF16", "llama", "LoRA", "None", "SGLang", "Torch", 1, fp32=True)
    assert [find_support(each).state for each in (asked, replace(asked, num_gpus=0))] == ["refused", "works"]
    assert find_support(replace(asked, engine="Torch")).state == "works"


@pytest.mark.parametrize("layout", sorted(LAYOUTS.keys() - {"INT4Asymmetric", "FP8BlockCT"}))
def test_headers_tell_the_layout_of_experts_as_the_configuration_does(layout: str) -> None:
    headers = headers_of("qwen3_moe", layout)
    run = draw_run(Random(0), ("q_proj",))
    assert run is not None
    lora = run.spec.model_copy(update={"adapter": type(run.spec.adapter)()})
    told = facts_of_headers(headers, adapter_config(lora), "bfloat16")
    assert expert_layouts(facts_of(headers)) == told.expert_formats == (layout,)
