"""What SGLang is asked to serve, and what is refused before it starts."""

from __future__ import annotations

import pytest

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.errors import UnsupportedError
from orbit_runtime.rollout.sglang_server import check_attached, check_served, lora_targets

PARENT = "model.layers.0.self_attn"
MODULES = {f"{PARENT}.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}


def layers(*names: str) -> tuple[str, ...]:
    return tuple(f"{PARENT}.{name}" for name in names)


@pytest.mark.parametrize("kind", ["LoRA", "OFT"])
@pytest.mark.parametrize(
    "names", [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("q_proj", "k_proj", "v_proj", "o_proj")]
)
def test_whole_layers_of_sglang_are_served(kind, names: tuple[str, ...]) -> None:
    check_served(AdapterConfig(type=kind, targets=names), layers(*names), MODULES)


@pytest.mark.parametrize("kind", ["LoRA", "OFT"])
def test_a_part_of_a_layer_that_sglang_fuses_is_refused_with_what_is_missing(kind) -> None:
    with pytest.raises(UnsupportedError, match=r"k_proj of model\.layers\.0\.self_attn has no adapter") as caught:
        check_served(AdapterConfig(type=kind, targets=("q_proj", "v_proj")), layers("q_proj", "v_proj"), MODULES)
    assert caught.value.exit_code == 78
    assert "add k_proj" in str(caught.value.fix)


@pytest.mark.parametrize("left_out", ["model.layers.1.self_attn.o_proj", "model.layers.0.mlp.shared_experts.o_proj"])
def test_a_target_that_one_module_lacks_is_refused(left_out: str) -> None:
    """Such as `experts.down_proj` alone, where shared experts have a `down_proj` too."""
    modules = {*MODULES, left_out, "model.layers.0.mlp.experts.o_proj"}
    with pytest.raises(UnsupportedError, match=f"every o_proj of a model, and {left_out} has no adapter"):
        check_served(AdapterConfig(type="LoRA", targets=("0.self_attn.o_proj",)), layers("o_proj"), modules)


V4 = ("q_a_proj", "kv_proj", "q_b_proj", "o_b_proj")
COMPRESSED = {f"{PARENT}.compressor.{name}" for name in ("kv_proj", "gate_proj", "indexer.q_b_proj")}


@pytest.mark.parametrize("kind", ["LoRA", "OFT"])
def test_the_attention_of_deepseek_v4_is_served_under_names_that_sglang_takes(kind) -> None:
    adapter = AdapterConfig(type=kind, targets=V4)
    check_served(adapter, layers(*V4), {*layers(*V4), *COMPRESSED})
    assert lora_targets(layers(*V4)) == ("kv_a_proj_with_mqa", "o_proj", "q_a_proj", "q_b_proj")


def test_a_part_of_deepseek_v4s_first_product_is_refused_with_what_is_missing() -> None:
    adapter = AdapterConfig(type="LoRA", targets=("q_a_proj",))
    with pytest.raises(UnsupportedError, match=r"runs q_a_proj and kv_proj as one layer, and kv_proj of") as caught:
        check_served(adapter, layers("q_a_proj"), {*layers(*V4), *COMPRESSED})
    assert "add kv_proj" in str(caught.value.fix)


def test_attached_servers_are_handed_no_adapter_that_needs_the_plug_in() -> None:
    check_attached(layers("q_a_proj", "q_b_proj", "o_proj"))
    with pytest.raises(
        UnsupportedError, match="kv_proj, o_b_proj of DeepSeek-V4 are adapted by Orbit's plug-in"
    ) as caught:
        check_attached(layers(*V4))
    assert caught.value.exit_code == 78
    assert caught.value.where == "spec.adapter.targets"


def test_another_scaling_is_refused_by_its_field() -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_served(AdapterConfig(type="LoRA", targets=("o_proj",), rslora=True), layers("o_proj"), MODULES)
    assert caught.value.where == "spec.adapter.lora.rslora"
