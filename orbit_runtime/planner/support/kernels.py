"""Which kernels of SGLang 0.5.23 multiply by a packed base on a GPU: what they round, activations or the base itself.

Belongs here: formats → the flags and variables that ask for kernels which round nothing, and what is rounded all the
same. Does not belong here: kernels of LoRA on routed experts (`rollout.sglang_experts`), the trainer's own rounding
(`quant.activations`).

SGLang chooses for speed: FP8 weights are multiplied as W8A8, NVFP4 as W4A4, gpt-oss's MXFP4 as W4A8. A trainer with
`model.activationPrecision: WeightOnly` computes another policy than such an engine samples from. On Blackwell, DeepGEMM
takes only scales that are powers of two, and SGLang quantises block-wise FP8 weights anew for it: another base.
Sources: `--help`, `layers/quantization/{fp8,fp8_utils,modelopt_quant,mxfp4}.py`, `compressed_tensors.py` and
`model_loader/utils.py` of SGLang 0.5.23. Not run on hardware.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from orbit_runtime.model_info.weights import ModelFacts, Role

DENSE: tuple[Role, ...] = ("attention", "dense_mlp", "shared_expert")
EXPERTS: tuple[Role, ...] = ("routed_expert",)
LATENT = ("deepseek_v3", "kimi_k2", "deepseek_v4")
"""Families whose attention reads the weights of `kv_b_proj` or `o_a_proj` itself, so that they must not be repacked."""
FP8_VARIABLE, DEEPGEMM_VARIABLE = "SGLANG_FORCE_FP8_MARLIN", "SGLANG_ENABLE_JIT_DEEPGEMM"
PLUGIN_VARIABLE = "ORBIT_SGLANG_WEIGHT_ONLY"
"""Of Orbit's plug-in (`sglang_plugin.weight_only`): the same for FP8 that compressed-tensors wrote."""
EXCHANGE = "moe-a2a-backend"
"""The engine argument that sends tokens to experts by programs which multiply with DeepGEMM alone."""
NVFP4_FLAG, MXFP4_FLAG, EXPERTS_FLAG = "--fp4-gemm-backend", "--flashinfer-mxfp4-moe-precision", "--moe-runner-backend"
REPORTING = {"BF16": "triton", "FP8": "triton", "INT4": "marlin", "NVFP4": "flashinfer_cutlass", "MXFP4": "marlin"}
"""Format of routed experts → a runner that takes its experts from SGLang's router, which is what is reported."""


@dataclass(frozen=True, slots=True)
class EngineKernels:
    """What a server on a GPU is asked for."""

    arguments: tuple[str, ...]
    variables: Mapping[str, str]
    rounded: tuple[str, ...]
    """Layers whose inputs SGLang rounds and the trainer does not. Example: `("routed experts in FP8",)`"""
    requantised: bool
    """Whether, on Blackwell, SGLang quantises the base anew."""
    keeps_fp8: bool
    """Whether projections that SGLang fuses keep a scale each, in FP8 with a scale for a whole tensor."""
    family: str


def choose_kernels(
    model: ModelFacts,
    activations: str,
    *,
    adapts_experts: bool,
    engine_arguments: Mapping[str, Any],
    reports_experts: bool = False,
) -> EngineKernels:
    """
    Args:
        activations: `model.activationPrecision`.
        adapts_experts: whether LoRA adapts routed experts, whose kernels are then chosen for it.
        engine_arguments: `rollout.engineArguments`.
        reports_experts: whether completions report the experts of their tokens.
    """
    arguments: list[str] = []
    variables: dict[str, str] = {}
    rounded: list[str] = []
    dense, experts = _formats(model, DENSE), _formats(model, EXPERTS)
    if activations != "NVFP4":
        if "NVFP4" in dense:
            arguments += [NVFP4_FLAG, "marlin"]
        if "NVFP4" in experts and not adapts_experts:
            arguments += [EXPERTS_FLAG, "marlin"]
    if activations != "FP8":
        if "FP8" in dense and _has_weight_only_fp8(model):
            variables |= {FP8_VARIABLE: "1", PLUGIN_VARIABLE: "1"}
        elif "FP8" in dense:
            rounded.append("linear layers in FP8")
        if "FP8" in experts:
            rounded.append("routed experts in FP8")
    if "MXFP4" in experts:
        if model.architecture.family == "gpt_oss":
            arguments += [MXFP4_FLAG, "bf16"]
        elif not adapts_experts:
            rounded.append("routed experts in MXFP4")
    # DeepSeek-V4's scales are powers of two as they are, and its attention needs DeepGEMM.
    is_blockwise = model.architecture.family != "deepseek_v4" and _has_blocks_of_fp8(model, (*DENSE, *EXPERTS))
    exchanges = engine_arguments.get(EXCHANGE, "none") != "none"
    if is_blockwise and not exchanges:
        variables[DEEPGEMM_VARIABLE] = "0"
    if reports_experts and not (adapts_experts or exchanges or EXPERTS_FLAG in arguments):
        arguments += _reporting_runner(model, experts)
    return EngineKernels(
        tuple(arguments),
        variables,
        tuple(rounded),
        requantised=is_blockwise and exchanges,
        # ModelOpt's class quantises them under the largest one before it does anything else.
        keeps_fp8=FP8_VARIABLE in variables and model.quantised_by != "modelopt",
        family=model.architecture.family,
    )


def _reporting_runner(model: ModelFacts, experts: Collection[str]) -> list[str]:
    """SGLang's own choice on Blackwell (`flashinfer_trtllm`), and for gpt-oss everywhere, picks experts inside the
    kernel: 0.5.23 then reports expert 0 for every token. DeepSeek-V4's routers are not replayed."""
    if model.architecture.family == "deepseek_v4" or not experts:
        return []
    # Of experts in several formats one runner must hold all; Triton's has the fewest conditions.
    return [EXPERTS_FLAG, REPORTING[min(experts)] if len(experts) == 1 else "triton"]


def find_unadaptable(model: ModelFacts) -> str | None:
    """Why SGLang 0.5.23 has no LoRA on these routed experts on any GPU; None if it has, or has on some.

    `rollout.sglang_experts.MOE_RUNNERS` lists the layouts that it has kernels for; MXFP4 is `planner.support`'s.
    """
    is_converted = model.quantised_by == "compressed-tensors"
    for stored in model.weights:
        if stored.weight.role not in EXPERTS or not stored.weight.is_linear:
            continue
        if stored.format == "FP8" and (is_converted or not stored.block):
            return "FP8 that is not in blocks of its original publisher's"
        if stored.format == "NVFP4" and is_converted:
            return "NVFP4 of compressed-tensors"
    return None


def _formats(model: ModelFacts, roles: Collection[Role]) -> set[str]:
    return {each.format for each in model.weights if each.weight.is_linear and each.weight.role in roles}


def _has_weight_only_fp8(model: ModelFacts) -> bool:
    """Not beside latent attention, and not in blocks that compressed-tensors wrote."""
    if model.architecture.family in LATENT:
        return False
    return not (model.quantised_by == "compressed-tensors" and _has_blocks_of_fp8(model, DENSE))


def _has_blocks_of_fp8(model: ModelFacts, roles: Collection[Role]) -> bool:
    return any(each.format == "FP8" and each.block for each in model.weights if each.weight.role in roles)
