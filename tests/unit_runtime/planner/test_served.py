"""Adapters that SGLang is handed, and those that are refused before it starts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.errors import UnsupportedError
from orbit_runtime.planner.support.served import Place, ServedAdapter, check_served, served_experts

ALL = ("gate_proj", "up_proj", "down_proj")
LORA = AdapterConfig(type="LoRA", targets=ALL, rank=8, alpha=16.0)
OFT = AdapterConfig(type="OFT", targets=ALL)


def check(
    adapter: AdapterConfig,
    layers: Collection[str],
    place: Place = "CPU",
    layouts: tuple[str, ...] = (),
    *,
    modules: Collection[str] = (),
    **changed: Any,
) -> None:
    asked = ServedAdapter(
        adapter.type, adapter.expert_layout, adapter.rank, adapter.scaling, adapter.rslora, tuple(layers),
        modules or layers, layouts, place,
    )  # fmt: skip
    check_served(replace(asked, **changed))


def layers(*names: str) -> tuple[str, ...]:
    return tuple(f"model.layers.1.mlp.experts.{name}" for name in names)


@pytest.mark.parametrize(
    ("adapter", "names", "place", "form"),
    [
        (LORA, ALL, "CPU", "MXFP4"),
        (replace(LORA, experts="PerExpert"), ALL, "CPU", "FP8"),
        (LORA, ALL, "GPU", "FP8Block"),
        (replace(LORA, alpha=4.0), ALL, "GPU", "INT4"),
        (LORA, ALL, "GPU", "MXFP4V4"),
        (LORA, ALL, "GPU", "FP8BlockV4"),
        (OFT, ALL, "CPU", "BF16"),
        (OFT, ALL[:2], "GPU", "MXFP4V4"),
        (OFT, ("gate_up_proj",), "GPU", "MXFP4GptOss"),
    ],
)
def test_what_the_buffers_hold_is_served(
    adapter: AdapterConfig, names: tuple[str, ...], place: Place, form: str
) -> None:
    check(adapter, layers(*names), place, (form,))
    assert served_experts(adapter.expert_layout, layers(*names)) == adapter.expert_layout


def test_without_adapted_experts_nothing_is_asked_of_the_layout() -> None:
    dense = ("model.layers.1.mlp.shared_experts.gate_proj",)
    check(replace(LORA, experts="Shared"), dense, "GPU", ())
    assert served_experts(LORA.expert_layout, dense) == "None"


@pytest.mark.parametrize(
    ("adapter", "names", "place", "form", "where", "says"),
    [
        (replace(LORA, experts="Shared"), ALL, "CPU", "BF16", "experts", "shared on the outer side, or one for each"),
        (replace(OFT, experts="PerExpert"), ALL, "CPU", "BF16", "experts", "so all experts share one R"),
        (LORA, ALL[:2], "CPU", "BF16", "targets", "down_proj has no adapter"),
        (LORA, ("gate_up_proj", "down_proj"), "GPU", "MXFP4GptOss", "targets", "gate_proj, up_proj has no adapter"),
        (replace(LORA, alpha=12.0), ALL, "CPU", "BF16", "lora.alpha", "here 1.5, and rounds it"),
        (OFT, ALL, "GPU", "BF16", "targets", "no R can be applied before their down_proj"),
        (
            LORA,
            ALL,
            "GPU",
            "FP8",
            "experts",
            "no LoRA on routed experts in FP8 that is not in blocks of its original publisher's",
        ),
        (LORA, ALL, "GPU", "NVFP4", "experts", "no LoRA on routed experts in NVFP4 of compressed-tensors"),
    ],
)
def test_what_they_cannot_hold_is_refused_by_its_field(
    adapter: AdapterConfig, names: tuple[str, ...], place: Place, form: str, where: str, says: str
) -> None:
    with pytest.raises(UnsupportedError, match=says) as caught:
        check(adapter, layers(*names), place, (form,))
    assert caught.value.exit_code == 78
    assert caught.value.where == f"spec.adapter.{where}"
    assert caught.value.fix


def test_experts_that_need_two_runners_are_refused() -> None:
    check(LORA, layers(*ALL), "GPU", ("INT4", "NVFP4ModelOpt"))
    with pytest.raises(UnsupportedError, match="packed as BF16, INT4, and a server of SGLang has one runner"):
        check(LORA, layers(*ALL), "GPU", ("INT4", "BF16"))


@pytest.mark.parametrize("capability", [(9, 0), (12, 0)])
def test_fp4_experts_of_deepseek_v4_take_a_lora_where_marlin_runs(capability: tuple[int, int]) -> None:
    check(LORA, layers(*ALL), "GPU", ("MXFP4V4",), capability=capability)


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_on_other_gpus_they_are_refused_and_other_experts_are_not(capability: tuple[int, int]) -> None:
    check(LORA, layers(*ALL), "GPU", ("NVFP4ModelOpt",), capability=capability)
    check(OFT, layers(*ALL[:2]), "GPU", ("MXFP4V4",), capability=capability)
    with pytest.raises(UnsupportedError, match="which run on Hopper and on SM120 only") as caught:
        check(LORA, layers(*ALL), "GPU", ("MXFP4V4",), capability=capability)
    assert caught.value.exit_code == 78
    assert caught.value.where == "spec.adapter.experts"


def test_a_target_of_dense_layers_alone_is_refused() -> None:
    names = (*layers("gate_proj", "up_proj"), "model.layers.1.mlp.shared_experts.down_proj")
    with pytest.raises(UnsupportedError, match="with down_proj in other layers, experts need it too"):
        check(OFT, names, "CPU", ())


PARENT = "model.layers.0.self_attn"
MODULES = {f"{PARENT}.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}


def attention(*names: str) -> tuple[str, ...]:
    return tuple(f"{PARENT}.{name}" for name in names)


@pytest.mark.parametrize("kind", ["LoRA", "OFT"])
@pytest.mark.parametrize(
    "names", [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("q_proj", "k_proj", "v_proj", "o_proj")]
)
def test_whole_layers_of_sglang_are_served(kind, names: tuple[str, ...]) -> None:
    check(AdapterConfig(type=kind, targets=names), attention(*names), modules=MODULES)


@pytest.mark.parametrize("kind", ["LoRA", "OFT"])
def test_a_part_of_a_layer_that_sglang_fuses_is_refused_with_what_is_missing(kind) -> None:
    with pytest.raises(UnsupportedError, match=r"k_proj of model\.layers\.0\.self_attn has no adapter") as caught:
        check(AdapterConfig(type=kind, targets=("q_proj", "v_proj")), attention("q_proj", "v_proj"), modules=MODULES)
    assert caught.value.exit_code == 78
    assert "add k_proj" in str(caught.value.fix)


@pytest.mark.parametrize("left_out", ["model.layers.1.self_attn.o_proj", "model.layers.0.mlp.shared_experts.o_proj"])
def test_a_target_that_one_module_lacks_is_refused(left_out: str) -> None:
    """Such as `experts.down_proj` alone, where shared experts have a `down_proj` too."""
    modules = {*MODULES, left_out, "model.layers.0.mlp.experts.o_proj"}
    with pytest.raises(UnsupportedError, match=f"every o_proj of a model, and {left_out} has no adapter"):
        check(AdapterConfig(type="LoRA", targets=("0.self_attn.o_proj",)), attention("o_proj"), modules=modules)


V4 = ("q_a_proj", "kv_proj", "q_b_proj", "o_b_proj")
COMPRESSED = {f"{PARENT}.compressor.{name}" for name in ("kv_proj", "gate_proj", "indexer.q_b_proj")}


@pytest.mark.parametrize("kind", ["LoRA", "OFT"])
def test_the_attention_of_deepseek_v4_is_served_under_names_that_sglang_takes(kind) -> None:
    adapter = AdapterConfig(type=kind, targets=V4)
    check(adapter, attention(*V4), modules={*attention(*V4), *COMPRESSED})


def test_a_part_of_deepseek_v4s_first_product_is_refused_with_what_is_missing() -> None:
    adapter = AdapterConfig(type="LoRA", targets=("q_a_proj",))
    with pytest.raises(UnsupportedError, match=r"runs q_a_proj and kv_proj as one layer, and kv_proj of") as caught:
        check(adapter, attention("q_a_proj"), modules={*attention(*V4), *COMPRESSED})
    assert "add kv_proj" in str(caught.value.fix)


def test_attached_servers_are_handed_no_adapter_that_needs_the_plug_in() -> None:
    names = attention("q_a_proj", "q_b_proj", "o_proj")
    check(AdapterConfig(type="LoRA", targets=()), names, "attached")
    with pytest.raises(
        UnsupportedError, match="kv_proj, o_b_proj of DeepSeek-V4 are adapted by Orbit's plug-in"
    ) as caught:
        check(AdapterConfig(type="LoRA", targets=V4), attention(*V4), "attached")
    assert caught.value.exit_code == 78
    assert caught.value.where == "spec.adapter.targets"


def test_another_scaling_is_refused_by_its_field() -> None:
    with pytest.raises(UnsupportedError) as caught:
        check(AdapterConfig(type="LoRA", targets=("o_proj",), rslora=True), attention("o_proj"), modules=MODULES)
    assert caught.value.where == "spec.adapter.lora.rslora"


def test_a_machine_without_a_gpu_samples_nothing_deterministically() -> None:
    check(LORA, (), "GPU", deterministic=True)
    with pytest.raises(UnsupportedError, match="on GPUs only") as caught:
        check(LORA, (), "CPU", deterministic=True)
    assert (caught.value.exit_code, caught.value.where) == (78, "spec.rollout.deterministic")
    assert "rollout.engine: Torch" in str(caught.value.fix)
