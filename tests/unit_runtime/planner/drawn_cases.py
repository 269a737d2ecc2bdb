"""Runs drawn by a seed: a manifest, a machine and a checkpoint, from the values that limits depend on.

Belongs here: what is drawn. Does not belong here: what must hold of it (`test_support`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from random import Random
from typing import Any

from orbit_runtime.errors import OrbitError
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.model_info.checkpoint import Headers, folder_headers
from orbit_runtime.model_info.families import describe
from orbit_runtime.model_info.gpus import CARDS
from orbit_runtime.model_info.headers import BITS, TensorInfo
from orbit_runtime.model_info.weights import EXPERT, Weight
from orbit_runtime.planner import Machine
from orbit_runtime.spec import OrbitRun

GIB = 2**30
CONFIGS = {
    "qwen3": ("tiny-qwen3", "BF16"), "llama": ("tiny-llama", "BF16"), "qwen3_moe": ("tiny-qwen3-moe", "FP8"),
    "glm4_moe": ("tiny-glm4-moe", "FP8"), "kimi_k2": ("tiny-kimi-k2", "INT4"),
}  # fmt: skip
"""Family → a shipped model with its configuration."""
SHIPPED = (
    ("tiny-adder", "NVFP4"), ("tiny-adder", "MXFP4"), ("tiny-deepseek-v4", "MXFP4"), ("tiny-gpt-oss", "MXFP4"),
    ("tiny-kimi-k2", "INT4"), ("tiny-moe-adder", "INT4"), ("tiny-qwen3-moe", "NVFP4"), ("tiny-glm4-moe", "FP8"),
)  # fmt: skip
GROUP = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FLOATS = {"type": "float", "symmetric": True, "dynamic": False}


def _compressed(packing: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(weights)}
    return {"quant_method": "compressed-tensors", "format": packing, "config_groups": {"group_0": group}}


Parts = dict[str, tuple[str, tuple[int, ...]]]
"""Ending → dtype and shape."""
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[int, int], Parts]]] = {
    "BF16": ({}, lambda out, into: {".weight": ("BF16", (out, into))}),
    "INT4": (
        _compressed("pack-quantized", GROUP),
        lambda out, into: {
            ".weight_packed": ("I32", (out, into // 8)), ".weight_scale": ("BF16", (out, into // 32)),
            ".weight_shape": ("I32", (2,)),
        },
    ),
    "INT4Asymmetric": (
        _compressed("pack-quantized", GROUP | {"symmetric": False}),
        lambda out, into: {
            ".weight_packed": ("I32", (out, into // 8)), ".weight_scale": ("BF16", (out, into // 32)),
            ".weight_shape": ("I32", (2,)), ".weight_zero_point": ("I32", (-(-out // 8), into // 32)),
        },
    ),
    "GPTQ": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False},
        lambda out, into: {
            ".qweight": ("I32", (into // 8, out)), ".qzeros": ("I32", (into // 32, out // 8)),
            ".scales": ("F16", (into // 32, out)), ".g_idx": ("I32", (into,)),
        },
    ),
    "AWQ": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        lambda out, into: {
            ".qweight": ("I32", (into, out // 8)), ".qzeros": ("I32", (into // 32, out // 8)),
            ".scales": ("F16", (into // 32, out)),
        },
    ),
    "FP8": (
        _compressed("float-quantized", FLOATS | {"num_bits": 8, "strategy": "channel"}),
        lambda out, into: {".weight": ("F8_E4M3", (out, into)), ".weight_scale": ("BF16", (out, 1))},
    ),
    "FP8Block": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
        lambda out, into: {
            ".weight": ("F8_E4M3", (out, into)), ".weight_scale_inv": ("F32", (-(-out // 128), -(-into // 128))),
        },
    ),
    "FP8BlockCT": (
        _compressed("float-quantized", FLOATS | {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]}),
        lambda out, into: {
            ".weight": ("F8_E4M3", (out, into)), ".weight_scale": ("BF16", (-(-out // 128), -(-into // 128))),
        },
    ),
    "NVFP4": (
        _compressed("nvfp4-pack-quantized", FLOATS | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}),
        lambda out, into: {
            ".weight_packed": ("U8", (out, into // 2)), ".weight_scale": ("F8_E4M3", (out, into // 16)),
            ".weight_global_scale": ("F32", (1,)),
        },
    ),
    "NVFP4ModelOpt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        lambda out, into: {
            ".weight": ("U8", (out, into // 2)), ".weight_scale": ("F8_E4M3", (out, into // 16)),
            ".weight_scale_2": ("F32", ()),
        },
    ),
    "MXFP4": (
        _compressed("mxfp4-pack-quantized", FLOATS | {"num_bits": 4, "strategy": "group", "group_size": 32}),
        lambda out, into: {".weight_packed": ("U8", (out, into // 2)), ".weight_scale": ("U8", (out, into // 32))},
    ),
}  # fmt: skip
"""Layout → the block of config.json, and the tensors of one linear."""


@cache
def headers_of(family: str, layout: str) -> Headers:
    """A small checkpoint of this family, every linear of whose layers is stored in this layout."""
    config = json.loads((builtin_folder(*CONFIGS[family]) / "config.json").read_text())
    config.pop("quantization_config", None)
    weights = describe(config).weights
    settings, parts_of = LAYOUTS[layout]
    if settings:
        plain = [weight.module for weight in weights if weight.is_linear and not _is_packed(weight)]
        ignored = "modules_to_not_convert" if settings["quant_method"] in ("fp8", "awq") else "ignore"
        config["quantization_config"] = {**settings, ignored: plain}
    tensors: dict[str, tuple[str, TensorInfo]] = {}
    for weight in weights:
        parts = parts_of(*weight.shape) if _is_packed(weight) else {".weight": (weight.dtype, weight.shape)}
        for number in range(weight.count if EXPERT in weight.name else 1):
            module = weight.module.replace(EXPERT, str(number))
            for ending, (dtype, shape) in parts.items():
                size = math.prod(shape) * BITS[dtype] // 8
                name = module + ending if weight.name.endswith(".weight") else module
                tensors[name] = ("model.safetensors", TensorInfo(dtype, shape, 0, size))
    return Headers(f"{family}-{layout}", config, tensors)


def _is_packed(weight: Weight) -> bool:
    return weight.is_linear and weight.role in ("attention", "dense_mlp", "shared_expert", "routed_expert")


@cache
def shipped_headers(name: str, precision: str) -> Headers:
    return folder_headers(builtin_folder(name, precision))


def draw_headers(random: Random) -> Headers:
    if random.random() < 0.3:
        return shipped_headers(*random.choice(SHIPPED))
    # Most limits are those of routed experts.
    family = random.choice(["qwen3", "llama", "qwen3_moe", "glm4_moe", "kimi_k2", "qwen3_moe", "kimi_k2"])
    return headers_of(family, random.choice(list(LAYOUTS)))


def draw_machine(random: Random) -> Machine:
    if random.random() < 0.25:
        return Machine(None, 0, 64 * GIB)
    return Machine(random.choice(CARDS), random.choice([1, 1, 2, 4, 8]), 4096 * GIB)


def draw_run(random: Random, targets: tuple[str, ...], uri: str = "m") -> OrbitRun | None:
    """A manifest; None if its fields contradict each other.

    Args:
        targets: every name that the model's adapter may target.
    """
    spec = {
        "model": {"uri": uri, "maxSequenceLength": random.choice([256, 1024])},
        "data": {"prompts": [{"uri": "p.jsonl"}]},
        "environment": {"rewards": [{"name": "r", "type": "ExactMatch"}]},
        "adapter": _adapter(random, targets),
        "rollout": _rollout(random),
        "training": {"steps": 1, "promptsPerStep": 4, **_training(random)},
        "placement": {"layout": random.choice(["Colocated", "Colocated", "Split"])},
    }
    algorithm = random.choice([{}, {}, {}, {"type": "SFT"}, {"type": "PPO"}, _distillation(random)])
    if algorithm:
        spec["algorithm"] = algorithm
    if algorithm.get("type") == "SFT":
        del spec["environment"]
    document = {"apiVersion": "orbitrl.dev/v1alpha1", "kind": "OrbitRun", "metadata": {"name": "a"}, "spec": spec}
    try:
        return OrbitRun.model_validate(document)
    except (OrbitError, ValueError):
        return None


def _adapter(random: Random, targets: tuple[str, ...]) -> dict[str, Any]:
    kind = random.choice(["LoRA", "LoRA", "LoRA", "OFT", "OFT", "Full"] if random.random() < 0.3 else ["LoRA", "OFT"])
    adapter: dict[str, Any] = {"type": kind, "experts": random.choice(["Auto", "Auto", *EXPERTS])}
    if kind == "LoRA":
        adapter["lora"] = {"rank": 8, "alpha": random.choice([4.0, 8.0, 16.0, 16.0, 12.0])}
        if random.random() < 0.1:
            adapter["lora"]["rslora"] = True
    if kind == "OFT":
        adapter["oft"] = {"blockSize": random.choice([8, 16, 32])}
    if random.random() < 0.4:
        adapter["targets"] = random.sample(targets, random.randint(1, len(targets)))
    return adapter


EXPERTS = ("SharedOuter", "Shared", "PerExpert", "None")


def _rollout(random: Random) -> dict[str, Any]:
    engine = random.choice(["Auto", "SGLang", "SGLang", "SGLang", "Torch", "OpenAI"])
    rollout: dict[str, Any] = {"engine": engine, "maxRunningRequests": 8}
    if engine == "OpenAI":
        rollout["endpoints"] = [{"url": "http://engine:30000"}]
    rare: Iterator[tuple[str, Any]] = iter(
        (
            ("deterministic", True), ("routerReplay", random.choice(["Record", "Replay"])),
            ("tensorParallel", random.choice([1, 2, 3, 4, 8])), ("replicas", random.choice([2, 3])),
            ("sleep", random.choice(["Cache", "All"])),
            ("engineArguments", random.choice(ARGUMENTS)),
            ("sampling", {"maxNewTokens": 64, **random.choice(SAMPLINGS)}),
        )
    )  # fmt: skip
    rollout["sampling"] = {"maxNewTokens": 64}
    rollout |= {name: value for name, value in rare if random.random() < 0.12}
    return rollout


ARGUMENTS = (
    {"ep-size": 2}, {"ep-size": 3}, {"attn-dp-size": 2}, {"attention-backend": "triton"}, {"disable-radix-cache": True},
    {"speculative-algorithm": "NGRAM"}, {"speculative-algorithm": "NEXTN"}, {"ep-size": 2, "moe-a2a-backend": "deepep"},
)  # fmt: skip
SAMPLINGS = (
    {"topK": 5}, {"topP": 0.9}, {"minP": 0.1}, {"repetitionPenalty": 1.1}, {"temperature": 0.7},
    {"stopTokenIds": [3]}, {"stopTokenIds": [900_000]}, {"logitBias": {"5": 1.0}}, {"logitBias": {"900000": 1.0}},
    {"ignoreEos": True, "stopTokenIds": [3]},
)  # fmt: skip


def _training(random: Random) -> dict[str, Any]:
    trainer = random.choice(["Auto", "Auto", "Torch", "Megatron"])
    training: dict[str, Any] = {"trainer": trainer}
    if trainer == "Megatron" and random.random() < 0.5:
        sizes = {name: random.choice([1, 2, 3, 4]) for name in random.sample(["tensor", "expert", "pipeline"], 2)}
        training["parallel"] = sizes
    return training


def _distillation(random: Random) -> dict[str, Any]:
    teacher = random.choice(
        [
            {"type": "Base"},
            {"type": "Base", "over": "Sampled"},
            {"type": "Average"},
            {"type": "Adapter", "uri": "runs/x"},
        ]
    )
    return {"type": "Distillation", "teacher": teacher}
