"""DeepSeek-V4's projections under the names that SGLang's LoRA has, and what its FP4 experts lack there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from orbit_runtime.model_info.weights import SGLANG_TARGETS
from orbit_runtime.sglang_plugin import deepseek_v4, mxfp4_experts
from orbit_runtime.sglang_plugin.rotation import parts
from tests.integration.tiny_families import COMMON, CONFIGS

ATTENTION = "model.layers.0.self_attn"


def hook_of(name: str):
    """What stands before or around one of SGLang's functions."""
    return next(hook for target, hook, _ in deepseek_v4.hooks() if target.endswith(name))


def test_sizes_are_those_of_transformers_layers() -> None:
    config = AutoConfig.for_model("deepseek_v4", **COMMON | CONFIGS["deepseek_v4"] | {"n_shared_experts": 1})
    with torch.device("meta"):
        layers = dict(AutoModelForCausalLM.from_config(config).named_modules())
    fields = SimpleNamespace(**{**CONFIGS["deepseek_v4"], **config.to_dict(), "n_shared_experts": 1})

    def into_out(*names: str) -> tuple[int, int]:
        found = [layers[f"model.layers.1.{name}"] for name in names]
        (into,) = {layer.in_features for layer in found}
        return into, sum(layer.out_features for layer in found)

    dims = deepseek_v4.hidden_dims
    assert dims(fields, "fused_qkv_a_proj_with_mqa") == into_out("self_attn.q_a_proj", "self_attn.kv_proj")
    assert dims(fields, "q_b_proj") == into_out("self_attn.q_b_proj")
    assert dims(fields, "o_proj") == into_out("self_attn.o_b_proj")
    shared = "mlp.shared_experts"
    assert dims(fields, "gate_up_proj") == into_out(f"{shared}.gate_proj", f"{shared}.up_proj")
    assert dims(fields, "down_proj") == into_out(f"{shared}.down_proj")
    experts = layers["model.layers.1.mlp.experts"]
    assert dims(fields, "gate_up_proj_moe") == tuple(reversed(experts.gate_up_proj.shape[1:]))
    assert dims(fields, "down_proj_moe") == tuple(reversed(experts.down_proj.shape[1:]))
    with pytest.raises(ValueError, match="no kv_b_proj that an adapter reaches"):
        dims(fields, "kv_b_proj")


def test_targets_go_by_the_names_that_sglang_has() -> None:
    rename = hook_of("get_normalized_target_modules")
    assert rename(["q_a_proj", "self_attn.kv_proj", "o_b_proj", "gate_proj"]) == (
        (["q_a_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj"],),
        {},
    )
    assert rename("all-linear") is None


@pytest.mark.parametrize(
    ("module", "known"),
    [
        (f"{ATTENTION}.wqkv_a", "fused_qkv_a_proj_with_mqa"),
        (f"{ATTENTION}.wq_b", "q_b_proj"),
        (f"{ATTENTION}.wo_b", "o_proj"),
    ],
)
def test_a_module_is_looked_for_under_its_known_name(module: str, known: str) -> None:
    targets = {known}
    assert hook_of("get_target_module_name")(module, targets) == ((f"{ATTENTION}.{known}", targets), {})


@pytest.mark.parametrize(
    "module", [f"{ATTENTION}.indexer.wq_b", f"{ATTENTION}.wo_a", f"{ATTENTION}.qkv_proj", "model.wq_b", "wq_b"]
)
def test_another_module_keeps_its_name(module: str) -> None:
    assert hook_of("get_target_module_name")(module, {"q_b_proj"}) is None


def test_an_adapters_tensors_are_renamed_where_they_are_the_attentions() -> None:
    names = ("self_attn.kv_proj", "self_attn.o_b_proj", "self_attn.q_a_proj", "mlp.shared_experts.gate_proj")
    layer = SimpleNamespace(weights={f"base_model.model.model.layers.0.{name}.lora_A.weight": name for name in names})
    hook_of("_normalize_weights")(SimpleNamespace(layers=[layer]))
    assert {name.split(".", 5)[-1].removesuffix(".lora_A.weight"): value for name, value in layer.weights.items()} == {
        "self_attn.kv_a_proj_with_mqa": "self_attn.kv_proj",
        "self_attn.o_proj": "self_attn.o_b_proj",
        "self_attn.q_a_proj": "self_attn.q_a_proj",
        "mlp.shared_experts.gate_proj": "mlp.shared_experts.gate_proj",
    }


def test_slots_are_read_back_under_the_files_names() -> None:
    assert parts(f"{ATTENTION}.wqkv_a") == (f"{ATTENTION}.q_a_proj", f"{ATTENTION}.kv_proj")
    assert parts(f"{ATTENTION}.wq_b") == (f"{ATTENTION}.q_b_proj",)
    assert parts(f"{ATTENTION}.wo_b") == (f"{ATTENTION}.o_b_proj",)
    named = {name.rpartition(".")[2] for leaf in deepseek_v4.PROJECTIONS for name in parts(f"{ATTENTION}.{leaf}")}
    assert named >= SGLANG_TARGETS.keys()


def test_other_families_are_wrapped_by_sglang_alone() -> None:
    asked = []
    manager = SimpleNamespace(base_hf_config=SimpleNamespace(model_type="deepseek_v3"), base_model=SimpleNamespace())
    hook_of("init_lora_modules")(asked.append, manager)
    assert asked == [manager]
    assert not vars(manager.base_model)


def test_gate_and_up_are_cut_after_the_lora_and_before_the_activation() -> None:
    """Against transformers' own activation of V4's experts, on products far beyond the limit."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

    config = AutoConfig.for_model("deepseek_v4", **COMMON | CONFIGS["deepseek_v4"], swiglu_limit=2.0)
    experts = DeepseekV4Experts(config)
    products, update = 5 * torch.randn(3, 2, 64), 5 * torch.randn(3, 2, 64)
    expected = experts._apply_gate(products + update)
    seen = []

    def add(tokens: torch.Tensor, between: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> None:
        seen.append((tokens, weights, chosen))
        between += update

    tokens, weights, chosen = torch.randn(3, 8), torch.rand(3, 2), torch.zeros(3, 2, dtype=torch.long)
    after = mxfp4_experts.cut(add, 2.0)
    assert after is not None
    after(tokens, products, weights, chosen)
    gate, up = products.chunk(2, -1)
    torch.testing.assert_close(F.silu(gate) * up, expected)
    assert seen == [(tokens, weights, chosen)]
    assert float(gate.max()) == 2.0
    assert float(up.min()) == -2.0


def test_a_pass_without_an_adapter_is_cut_as_well() -> None:
    products = torch.tensor([[[9.0, -9.0, 9.0, -9.0]]])
    after = mxfp4_experts.cut(None, 3.0)
    assert after is not None
    after(products, products, products, products)
    assert products.tolist() == [[[3.0, -9.0, 3.0, -3.0]]]
    assert mxfp4_experts.cut(None, None) is None


def test_padded_weights_are_refused() -> None:
    mxfp4_experts.check_unpadded("width", 320, 320)
    with pytest.raises(ValueError, match="pads the width of these experts from 288 to 320"):
        mxfp4_experts.check_unpadded("width", 320, 288)


@pytest.mark.parametrize(
    ("layout", "count"), [("SharedOuter", 1), ("PerExpert", 1), ("Shared", 0), ("None", 0), ("", 0)]
)
def test_packed_experts_are_wrapped_where_sglangs_buffers_hold_their_lora(layout: str, count: int) -> None:
    assert len(list(mxfp4_experts.hooks(layout))) == count
