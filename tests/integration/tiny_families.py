"""Random checkpoints of every model family in every format that fits it, and the same values in BF16 for transformers.

    python -m tests.integration.tiny_families FOLDER --family qwen3_moe --layout INT4

writes `FOLDER/packed` (quantised by our codecs, as such checkpoints are published) and `FOLDER/plain`.

Belongs here: configurations, random values, packing. Does not belong here: any expectation.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.quant import mxfp4
from orbit_runtime.quant.formats import FORMATS
from orbit_runtime.quant.fp8_block import FP8BlockWeight

COMMON = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
MLA = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4, "n_group": 2, "topk_group": 1, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "intermediate_size": 96, "moe_intermediate_size": 32,
    "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {"intermediate_size": 96, "head_dim": 16},
    "llama": {"intermediate_size": 96},
    "qwen3_moe": {
        "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
        "head_dim": 16, "norm_topk_prob": True,
    },
    "glm4_moe": {
        "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "head_dim": 16,
        "use_qk_norm": True, "attention_bias": True, "num_nextn_predict_layers": 0,
    },
    "deepseek_v3": MLA,
    "kimi_k2": MLA,
    "kimi_k25": MLA,
    "gpt_oss": {
        "intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16,
        "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v4": {
        "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 32, "o_groups": 2,
        "o_lora_rank": 32, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "index_n_heads": 16, "index_head_dim": 16, "index_topk": 2, "sliding_window": 6, "hc_mult": 2,
        "compress_ratios": [0, 4, 128], "compress_rate_hca": 8, "qk_rope_head_dim": 8,
        "partial_rotary_factor": 0.25, "num_hash_layers": 1, "num_nextn_predict_layers": 0,
    },
}  # fmt: skip
EMPTY: Mapping[str, int] = MappingProxyType({})
PUBLISHED_AS = {"kimi_k2": "deepseek_v3", "kimi_k25": "deepseek_v3"}
"""What transformers builds for a family that it does not know by this name."""
UNPUBLISHED = {
    "deepseek_v4": (
        (r"^model\.", ""),
        (r"^embed_tokens\.", "embed."),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
    )
}
"""Names that transformers 5.19 saves otherwise than they are published and than it loads them itself, by pattern."""
GENERAL = ("BF16", "INT4", "INT4Asymmetric", "FP8", "FP8Block", "NVFP4", "NVFP4ModelOpt", "MXFP4")
LAYOUTS: dict[str, tuple[str, ...]] = dict.fromkeys(CONFIGS, GENERAL) | {
    "gpt_oss": ("BF16", "MXFP4GptOss"),
    "deepseek_v4": ("BF16", "FP8BlockV4", "MXFP4V4"),
}
LINEARS = re.compile(
    r".*\.((q|k|v|o|q_a|q_b|kv_b|gate|up|down)_proj|kv_a_proj_with_mqa|w[123]|wq_a|wq_b|wkv|wo_a|wo_b)\.weight$"
)
NEVER = re.compile(r".*compressor\..*")


def _compressed_tensors(packing: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors", "format": packing, "ignore": ["re:.*lm_head.*"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


_FP8_BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
QUANTIZATION: dict[str, dict[str, Any]] = {
    "INT4": _compressed_tensors("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
    "INT4Asymmetric": _compressed_tensors(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False
    ),
    "FP8": _compressed_tensors("float-quantized", num_bits=8, type="float", strategy="channel"),
    "FP8Block": _FP8_BLOCK,
    "FP8BlockV4": _FP8_BLOCK | {"scale_fmt": "ue8m0"},
    "NVFP4": _compressed_tensors(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
    ),
    "NVFP4ModelOpt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["*lm_head*"]},
    "MXFP4": _compressed_tensors("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
    "MXFP4GptOss": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    "MXFP4V4": _FP8_BLOCK | {"scale_fmt": "ue8m0"},
}


def make_family(
    folder: Path, family: str, layout: str, *, seed: int = 0, sizes: Mapping[str, int] = EMPTY
) -> tuple[Path, Path]:
    """`(packed, plain)`: the checkpoint, and one in BF16 of the same values that transformers loads by itself.

    Args:
        sizes: of the configuration, where the usual ones will not do.
    """
    plain, packed = folder / "plain", folder / "packed"
    _save_random(plain, PUBLISHED_AS.get(family, family), CONFIGS[family] | sizes, seed)
    tensors = {_published_name(family, name): each for name, each in load_file(plain / "model.safetensors").items()}
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts, value = _pack(name, tensor, layout)
        stored |= parts
        tensors[name] = value
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    if layout != "BF16":
        config["quantization_config"] = QUANTIZATION[layout]
    if family == "deepseek_v4":
        # As published; transformers writes other fields for the same.
        config |= {key: CONFIGS[family][key] for key in ("compress_ratios", "num_hash_layers")}
        config |= {"expert_dtype": "fp4" if layout == "MXFP4V4" else "fp8"} if layout != "BF16" else {}
    config["model_type"] = family
    if family == "kimi_k25":
        config, stored = _beside_a_tower(config, stored)
    packed.mkdir(parents=True)
    (packed / "config.json").write_text(json.dumps(config))
    save_file({name: each.contiguous() for name, each in stored.items()}, packed / "model.safetensors")
    for path in builtin_folder("tiny-adder", "BF16").iterdir():
        if path.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(path, packed / path.name)
    return packed, plain


def _save_random(folder: Path, architecture: str, sizes: dict[str, Any], seed: int) -> None:
    """Weights large enough that every layer, and the choice of experts, matters."""
    config = AutoConfig.for_model(architecture, **COMMON | sizes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("tid2eid"):
                tensor.copy_(torch.rand(len(tensor), config.n_routed_experts).argsort(-1)[:, : tensor.shape[1]])
            elif name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(tensor, std=0.2)
            elif tensor.requires_grad:
                center = 1.0 if "norm" in name or name.endswith("hc.scale") else 0.0
                deviation = 0.1 if center else 0.5 if name.endswith("sinks") else 0.15
                torch.nn.init.normal_(tensor, mean=center, std=deviation)
    kept = {name: buffer.clone() for name, buffer in model.named_buffers() if "e_score_correction" in name}
    model.to(torch.bfloat16)
    for name, buffer in kept.items():
        model.get_buffer(name).data = buffer
    model.save_pretrained(folder, max_shard_size="5GB")


def _published_name(family: str, name: str) -> str:
    for pattern, replacement in UNPUBLISHED.get(family, ()):
        name = re.sub(pattern, replacement, name)
    return name


def _pack(name: str, tensor: Tensor, layout: str) -> tuple[dict[str, Tensor], Tensor]:
    """What the packed file holds for a tensor, and the value that it stands for."""
    if layout == "MXFP4GptOss" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return _pack_gpt_oss(name, tensor)
    if layout == "BF16" or not LINEARS.match(name) or NEVER.match(name):
        return {name: tensor}, tensor
    if layout == "MXFP4V4" and not re.match(r".*\.experts\.\d+\.", name):
        layout = "FP8BlockV4"
    if layout == "MXFP4GptOss":
        return {name: tensor}, tensor
    codec = FORMATS[layout]
    assert codec.quantize is not None
    assert codec.to_checkpoint is not None
    weight = codec.quantize(tensor, *((32,) if layout.startswith("INT4") else ()))
    if layout == "FP8BlockV4":
        weight = _with_powers_of_two(tensor, weight)
    module = name.removesuffix(".weight")
    parts = {f"{module}.{key}": part for key, part in codec.to_checkpoint(weight).items()}
    return parts, codec.dequantize(weight)


def _with_powers_of_two(tensor: Tensor, weight: FP8BlockWeight) -> FP8BlockWeight:
    """Scales in E8M0, as published; the codec writes those of DeepSeek-V3, in fp32."""
    scale = weight.scale.float().log2().ceil().exp2()
    rows, columns = tensor.shape
    per_value = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    codes = (tensor.float() / per_value).to(torch.float8_e4m3fn)
    return replace(weight, qdata=codes, scale=scale.to(torch.float8_e8m0fnu))


def _pack_gpt_oss(name: str, tensor_EKN: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    weights = [mxfp4.quantize(each.t().contiguous()) for each in tensor_EKN]
    blocks = torch.stack([weight.qdata.unflatten(1, (-1, 16)) for weight in weights])
    scales = torch.stack([weight.scale for weight in weights])
    value = torch.stack([mxfp4.dequantize(weight).t() for weight in weights]).contiguous()
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, value


def _beside_a_tower(config: dict[str, Any], stored: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tower = {"vision_tower.encoder.blocks.0.wo.weight": torch.zeros(8, 8), "mm_projector.proj.0.bias": torch.zeros(8)}
    text = config | {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "a.B"}}
    whole = {"model_type": "kimi_k25", "text_config": text, "vision_config": {"hidden_size": 8}}
    return whole, {f"language_model.{name}": tensor for name, tensor in stored.items()} | tower


def all_pairs() -> Iterator[tuple[str, str]]:
    """Every (family, layout)."""
    for family, layouts in LAYOUTS.items():
        for layout in layouts:
            yield family, layout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=sorted(CONFIGS), required=True)
    parser.add_argument("--layout", required=True)
    arguments = parser.parse_args()
    if arguments.layout not in LAYOUTS[arguments.family]:
        parser.error(f"layouts of {arguments.family}: {', '.join(LAYOUTS[arguments.family])}")
    print(*make_family(arguments.folder, arguments.family, arguments.layout), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
