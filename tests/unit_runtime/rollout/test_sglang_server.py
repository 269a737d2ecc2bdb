"""What SGLang is asked to serve, and what is refused before it starts."""

from __future__ import annotations

import pytest

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.errors import UnsupportedError
from orbit_runtime.rollout.sglang_server import check_served

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


def test_the_attention_of_deepseek_v4_is_refused() -> None:
    adapter = AdapterConfig(type="OFT", targets=("q_a_proj", "kv_proj"))
    with pytest.raises(UnsupportedError, match="no adapters of kv_proj of DeepSeek-V4") as caught:
        check_served(adapter, layers("q_a_proj", "kv_proj"), set())
    assert caught.value.where == "spec.adapter.targets"


def test_another_scaling_is_refused_by_its_field() -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_served(AdapterConfig(type="LoRA", targets=("o_proj",), rslora=True), layers("o_proj"), MODULES)
    assert caught.value.where == "spec.adapter.lora.rslora"
