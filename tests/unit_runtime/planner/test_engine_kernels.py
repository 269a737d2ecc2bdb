"""Kernels of SGLang that do not round activations, by what is published: asked for where there are some, else told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orbit_runtime.model_info.cards import card_facts
from orbit_runtime.model_info.gpus import find_gpu
from orbit_runtime.planner import Machine, plan
from orbit_runtime.planner.support.kernels import (
    DEEPGEMM_VARIABLE,
    EXCHANGE,
    EXPERTS_FLAG,
    FP8_VARIABLE,
    EngineKernels,
    choose_kernels,
)
from orbit_runtime.workers.servers.protocol import WEIGHT_ONLY_VARIABLE
from tests.unit_runtime.planner.test_planner import build

NVFP4, NVFP4_EXPERTS = ("--fp4-gemm-backend", "marlin"), ("--moe-runner-backend", "marlin")
WEIGHT_ONLY = {FP8_VARIABLE: "1", WEIGHT_ONLY_VARIABLE: "1"}
MARLIN = {**WEIGHT_ONLY, DEEPGEMM_VARIABLE: "0"}
NONE: dict[str, str] = {}


def chosen(
    repository: str,
    activations: str = "WeightOnly",
    *,
    adapts_experts: bool = False,
    reports_experts: bool = False,
    **arguments: object,
) -> EngineKernels:
    return choose_kernels(
        card_facts(repository),
        activations,
        adapts_experts=adapts_experts,
        engine_arguments=arguments,
        reports_experts=reports_experts,
    )


@pytest.mark.parametrize(
    ("repository", "adapts_experts", "arguments", "variables", "rounded"),
    [
        ("moonshotai/Kimi-K2.6", True, (), NONE, ()),
        ("Qwen/Qwen3-4B", False, (), NONE, ()),
        ("Qwen/Qwen3-4B-FP8", False, (), MARLIN, ()),
        ("Qwen/Qwen3-30B-A3B-FP8", True, (), MARLIN, ("routed experts in FP8",)),
        ("nvidia/Qwen3-235B-A22B-NVFP4", False, (*NVFP4, *NVFP4_EXPERTS), NONE, ()),
        ("nvidia/Qwen3-235B-A22B-NVFP4", True, NVFP4, NONE, ()),
        ("zai-org/GLM-4.5-FP8", False, (), WEIGHT_ONLY, ("routed experts in FP8",)),
        ("openai/gpt-oss-120b", False, ("--flashinfer-mxfp4-moe-precision", "bf16"), NONE, ()),
        ("deepseek-ai/DeepSeek-V4-Pro", True, (), NONE, ("linear layers in FP8",)),
        ("deepseek-ai/DeepSeek-V4-Pro", False, (), NONE, ("linear layers in FP8", "routed experts in MXFP4")),
    ],
)
def test_weight_only_is_asked_for_where_sglang_has_it(
    repository: str, adapts_experts: bool, arguments: object, variables: object, rounded: object
) -> None:
    found = chosen(repository, adapts_experts=adapts_experts)
    assert (found.arguments, found.variables, found.rounded) == (arguments, variables, rounded)


@pytest.mark.parametrize(
    ("repository", "activations", "variables"),
    [("Qwen/Qwen3-4B-FP8", "FP8", {DEEPGEMM_VARIABLE: "0"}), ("nvidia/Qwen3-235B-A22B-NVFP4", "NVFP4", NONE)],
)
def test_a_trainer_that_rounds_leaves_activations_to_sglang(
    repository: str, activations: str, variables: dict[str, str]
) -> None:
    found = chosen(repository, activations)
    assert (found.arguments, found.variables, found.rounded) == ((), variables, ())


@pytest.mark.parametrize(
    ("method", "told"), [("fp8", False), ("modelopt", False), ("compressed-tensors", True), ("", False)]
)
def test_who_wrote_blocks_of_fp8_decides(method: str, told: bool) -> None:
    model = replace(card_facts("Qwen/Qwen3-4B-FP8"), quantised_by=method)
    found = choose_kernels(model, "WeightOnly", adapts_experts=False, engine_arguments={})
    assert bool(found.rounded) == told
    assert (FP8_VARIABLE in found.variables) != told


def test_the_plan_tells_what_is_rounded_on_a_gpu_and_nothing_on_a_cpu() -> None:
    repository = "zai-org/GLM-4.5-FP8"
    run, model = build(repository, rollout={"engine": "SGLang"}), card_facts(repository)
    says = "SGLang rounds the inputs of routed experts in FP8 before"
    told = [
        any(note.startswith(says) for note in plan(run, model, machine).notes)
        for machine in (Machine(find_gpu("B200"), 8, 4096 * 2**30), Machine(None))
    ]
    assert told == [True, False]


def test_a_base_that_sglang_would_quantise_anew_is_told() -> None:
    """DeepGEMM's programs for distributed experts take no other scales; where they are not asked for, it is off."""
    repository, exchange = "Qwen/Qwen3-235B-A22B-FP8", {EXCHANGE: "deepep", "ep-size": 8}
    found = chosen(repository, **exchange)
    assert found.requantised
    assert DEEPGEMM_VARIABLE not in found.variables
    assert not chosen("deepseek-ai/DeepSeek-V4-Pro", **exchange).requantised
    run = build(repository, rollout={"engine": "SGLang", "engineArguments": exchange})
    notes = plan(run, card_facts(repository), Machine(find_gpu("B200"), 8, 4096 * 2**30)).notes
    assert any("quantises the base's FP8 anew on Blackwell" in note for note in notes)


@pytest.mark.parametrize(
    ("repository", "activations", "runner"),
    [
        ("moonshotai/Kimi-K2.6", "WeightOnly", "marlin"),
        ("Qwen/Qwen3-235B-A22B", "WeightOnly", "triton"),
        ("Qwen/Qwen3-235B-A22B-FP8", "FP8", "triton"),
        ("zai-org/GLM-4.5-FP8", "WeightOnly", "triton"),
        ("nvidia/Qwen3-235B-A22B-NVFP4", "WeightOnly", "marlin"),
        ("nvidia/Qwen3-235B-A22B-NVFP4", "NVFP4", "flashinfer_cutlass"),
        ("openai/gpt-oss-120b", "WeightOnly", "marlin"),
    ],
)
def test_experts_are_reported_by_a_runner_that_is_told_them(repository: str, activations: str, runner: str) -> None:
    told = chosen(repository, activations, reports_experts=True).arguments
    assert (told.count(EXPERTS_FLAG), told[told.index(EXPERTS_FLAG) + 1]) == (1, runner)


def test_no_runner_is_asked_for_where_none_reports_or_one_is_chosen_already() -> None:
    kimi = "moonshotai/Kimi-K2.6"
    assert EXPERTS_FLAG not in chosen(kimi).arguments
    assert EXPERTS_FLAG not in chosen(kimi, adapts_experts=True, reports_experts=True).arguments
    exchange = {EXCHANGE: "deepep", "ep-size": 8}
    assert EXPERTS_FLAG not in chosen(kimi, reports_experts=True, **exchange).arguments
    assert EXPERTS_FLAG not in chosen("Qwen/Qwen3-4B", reports_experts=True).arguments


@pytest.mark.parametrize(
    ("repository", "method", "refused"),
    [
        ("zai-org/GLM-4.5-FP8", "", True),
        ("Qwen/Qwen3-30B-A3B-FP8", "fp8", False),
        ("Qwen/Qwen3-30B-A3B-FP8", "compressed-tensors", True),
        ("nvidia/Qwen3-30B-A3B-NVFP4", "modelopt", False),
        ("nvidia/Qwen3-30B-A3B-NVFP4", "compressed-tensors", True),
        ("moonshotai/Kimi-K2.6", "compressed-tensors", False),
    ],
)
def test_lora_on_experts_that_no_kernel_of_sglang_takes_is_refused_by_the_plan(
    repository: str, method: str, refused: bool
) -> None:
    model = replace(card_facts(repository), quantised_by=method)
    machine = Machine(find_gpu("B200"), 8, 4096 * 2**30)
    told = []
    for experts in ("SharedOuter", "None"):
        run = build(repository, adapter={"type": "LoRA", "experts": experts}, rollout={"engine": "SGLang"})
        told.append(
            [each for each in plan(run, model, machine).problems if "no LoRA on routed experts" in each.message]
        )
    assert [bool(each) for each in told] == [refused, False]
    assert all(each.where == "spec.adapter.experts" for each in told[0])
    on_cpu = build(repository, adapter={"type": "LoRA"}, rollout={"engine": "SGLang"})
    assert not any("no LoRA on routed" in each.message for each in plan(on_cpu, model, Machine(None)).problems)
