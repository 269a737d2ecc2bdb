"""DeepSeek-V4's attention under SGLang's LoRA, which supports DeepSeek-V3's attention but not this one.

V4 has the same structure as V3: one replicated product computes the query's latent and the keys, another the heads'
queries, a third the output. Its projections are therefore presented to SGLang under V3's names, and buffers, ranks,
slots, loading and kernels are SGLang's own. OFT needs nothing more: its hook precedes the same wrappers.

    files and trainer    SGLang's module   target name
    q_a_proj, kv_proj    wqkv_a            fused_qkv_a_proj_with_mqa
    q_b_proj             wq_b              q_b_proj
    o_b_proj             wo_b              o_proj

`wo_a`, by whose weight SGLang multiplies without calling the module, is not a target of Orbit (`o_a_proj`). Neither are
the projections of compressors and indexer, which read the same input without rotation.

GPU: not run on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from orbit_runtime.model_info.weights import SGLANG_TARGETS

LORA = "sglang.srt.lora"
MODEL_TYPE = "deepseek_v4"
ATTENTION = "self_attn"
PROJECTIONS: Mapping[str, str] = {"wqkv_a": "fused_qkv_a_proj_with_mqa", "wq_b": "q_b_proj", "wo_b": "o_proj"}
"""SGLang's module in the attention → its target name."""


def hooks() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """(target, hook, kind) of each hook. They do not affect other families."""
    yield f"{LORA}.utils.get_normalized_target_modules", _name_targets, "BEFORE"
    yield f"{LORA}.utils.get_target_module_name", _name_module, "BEFORE"
    yield f"{LORA}.lora.LoRAAdapter._normalize_weights", _name_weights, "BEFORE"
    yield f"{LORA}.lora_manager.LoRAManager.init_lora_modules", _around_modules, "AROUND"


def hidden_dims(config: Any, target: str) -> tuple[int, int]:
    """Input and output features of one of SGLang's targets, over all ranks.

    Raises:
        ValueError: V4 has no such target.
    """
    hidden, latent, inner = config.hidden_size, config.q_lora_rank, config.moe_intermediate_size
    shared = inner * (config.n_shared_experts or 0)
    dims = {
        "fused_qkv_a_proj_with_mqa": (hidden, latent + config.head_dim),
        "q_b_proj": (latent, config.num_attention_heads * config.head_dim),
        "o_proj": (config.o_groups * config.o_lora_rank, hidden),
        "gate_up_proj": (hidden, 2 * shared),
        "down_proj": (shared, hidden),
        "gate_up_proj_moe": (hidden, 2 * inner),
        "down_proj_moe": (inner, hidden),
    }
    if target not in dims:
        raise ValueError(f"DeepSeek-V4 has no {target} that an adapter reaches; it has {', '.join(dims)}")
    return dims[target]


def _name_targets(targets: Any, *_: Any, **__: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Target names of a server or of an adapter's configuration; a string means all."""
    if isinstance(targets, str):
        return None
    leaves = [name.rpartition(".")[2] for name in targets]
    return ([SGLANG_TARGETS.get(leaf, leaf) for leaf in leaves],), {}


def _name_module(name: str, targets: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """`…self_attn.wq_b` → `…self_attn.q_b_proj`. An indexer has a `wq_b` of its own."""
    parent, _, leaf = name.rpartition(".")
    if leaf not in PROJECTIONS or not parent.endswith(f".{ATTENTION}"):
        return None
    return (f"{parent}.{PROJECTIONS[leaf]}", targets), {}


def _name_weights(adapter: Any) -> None:
    """Renames an adapter's tensors before SGLang combines those of fused layers."""
    for layer in adapter.layers:
        for name in list(layer.weights):
            for leaf, known in SGLANG_TARGETS.items():
                here, there = f".{ATTENTION}.{leaf}.", f".{ATTENTION}.{known}."
                if here in name:
                    layer.weights[name.replace(here, there)] = layer.weights.pop(name)


def _around_modules(original: Callable[..., None], manager: Any) -> None:
    config, model = manager.base_hf_config, manager.base_model
    if config.model_type != MODEL_TYPE:
        original(manager)
        return
    # SGLang calls this method of its models, and would otherwise derive the sizes from V3's configuration.
    model.get_hidden_dim = lambda target, _: hidden_dims(config, target)
    original(manager)
    for name, attention in [each for each in model.named_modules() if each[0].endswith(f".{ATTENTION}")]:
        for leaf, target in PROJECTIONS.items():
            if target in manager.target_modules:
                _wrap(manager, f"{name}.{leaf}", getattr(attention, leaf, None))


def _wrap(manager: Any, name: str, base: Any) -> None:
    from sglang.srt.layers.utils import get_layer_id

    if base is None:
        raise ValueError(f"the model has no {name}: unset SGLANG_OPT_FUSE_WQA_WKV, which splits it")
    wrapper = manager.set_lora_module(name, base)
    leaf = name.rpartition(".")[2]
    if leaf == "wqkv_a":
        wrapper.first_output_dim = manager.base_hf_config.q_lora_rank
    if leaf == "wq_b":
        # V4's attention reads this attribute without checking that it exists.
        wrapper.quant_method = base.quant_method
    manager.lora_modules[get_layer_id(name)][name] = wrapper
