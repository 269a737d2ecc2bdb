"""Adapters of routed experts that SGLang is handed, those that are refused before it starts, and its flags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.errors import UnsupportedError
from orbit_runtime.rollout.sglang_experts import check_experts, check_generation, served_experts
from orbit_runtime.rollout.sglang_server import ServerSettings, server_arguments

ALL = ("gate_proj", "up_proj", "down_proj")
LORA = AdapterConfig(type="LoRA", targets=ALL, rank=8, alpha=16.0)
OFT = AdapterConfig(type="OFT", targets=ALL)


def layers(*names: str) -> tuple[str, ...]:
    return tuple(f"model.layers.1.mlp.experts.{name}" for name in names)


@pytest.mark.parametrize(
    ("adapter", "names", "device", "form"),
    [
        (LORA, ALL, "cpu", "MXFP4"),
        (replace(LORA, experts="PerExpert"), ALL, "cpu", "FP8"),
        (LORA, ALL, "cuda", "FP8Block"),
        (replace(LORA, alpha=4.0), ALL, "cuda", "INT4"),
        (LORA, ALL, "cuda", "MXFP4V4"),
        (LORA, ALL, "cuda", "FP8BlockV4"),
        (OFT, ALL, "cpu", "BF16"),
        (OFT, ALL[:2], "cuda", "MXFP4V4"),
        (OFT, ("gate_up_proj",), "cuda", "MXFP4GptOss"),
    ],
)
def test_what_the_buffers_hold_is_served(
    adapter: AdapterConfig, names: tuple[str, ...], device: str, form: str
) -> None:
    check_experts(adapter, layers(*names), device, (form,))
    assert served_experts(adapter, layers(*names)) == adapter.expert_layout


def test_without_adapted_experts_nothing_is_asked_of_the_layout() -> None:
    dense = ("model.layers.1.mlp.shared_experts.gate_proj",)
    check_experts(replace(LORA, experts="Shared"), dense, "cuda", ())
    assert served_experts(LORA, dense) == "None"


@pytest.mark.parametrize(
    ("adapter", "names", "device", "form", "where", "says"),
    [
        (replace(LORA, experts="Shared"), ALL, "cpu", "BF16", "experts", "in the layout Shared"),
        (replace(OFT, experts="PerExpert"), ALL, "cpu", "BF16", "experts", "in the layout PerExpert"),
        (LORA, ALL[:2], "cpu", "BF16", "targets", "down_proj has no adapter"),
        (LORA, ("gate_up_proj", "down_proj"), "cuda", "MXFP4GptOss", "targets", "gate_proj, up_proj has no adapter"),
        (replace(LORA, alpha=12.0), ALL, "cpu", "BF16", "lora.alpha", "here 1.5, and rounds it"),
        (OFT, ALL, "cuda", "BF16", "targets", "the input of down_proj cannot be rotated inside it"),
        (
            LORA,
            ALL,
            "cuda",
            "FP8",
            "experts",
            "no LoRA on routed experts in FP8; it has on BF16, FP8Block, FP8BlockV4, INT4",
        ),
        (LORA, ALL, "cuda", "NVFP4", "experts", "no LoRA on routed experts in NVFP4"),
    ],
)
def test_what_they_cannot_hold_is_refused_by_its_field(
    adapter: AdapterConfig, names: tuple[str, ...], device: str, form: str, where: str, says: str
) -> None:
    with pytest.raises(UnsupportedError, match=says) as caught:
        check_experts(adapter, layers(*names), device, (form,))
    assert caught.value.exit_code == 78
    assert caught.value.where == f"spec.adapter.{where}"
    assert caught.value.fix


def test_experts_that_need_two_runners_are_refused() -> None:
    check_experts(LORA, layers(*ALL), "cuda", ("INT4", "NVFP4ModelOpt"))
    with pytest.raises(UnsupportedError, match="packed as BF16, INT4, and a server of SGLang has one runner"):
        check_experts(LORA, layers(*ALL), "cuda", ("INT4", "BF16"))


@pytest.mark.parametrize("capability", [(9, 0), (12, 0)])
def test_fp4_experts_of_deepseek_v4_take_a_lora_where_marlin_runs(capability: tuple[int, int]) -> None:
    check_generation(("MXFP4V4",), capability)


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_on_other_gpus_they_are_refused_and_other_experts_are_not(capability: tuple[int, int]) -> None:
    check_generation(("FP8BlockV4", "NVFP4ModelOpt"), capability)
    check_generation((), capability)
    said = f"compute capability is {capability[0]}.0"
    with pytest.raises(UnsupportedError, match=said) as caught:
        check_generation(("MXFP4V4",), capability)
    assert caught.value.exit_code == 78
    assert caught.value.where == "spec.adapter.experts"


def test_a_target_of_dense_layers_alone_is_refused() -> None:
    names = (*layers("gate_proj", "up_proj"), "model.layers.1.mlp.shared_experts.down_proj")
    with pytest.raises(UnsupportedError, match="with down_proj in other layers, experts need it too"):
        check_experts(OFT, names, "cpu", ())


def arguments(**changed: object) -> list[str]:
    settings = ServerSettings(
        model=Path("base"), device="cuda", dtype="bfloat16", targets=ALL, max_running_requests=8,
        max_sequence_length=256, seed=0,
    )  # fmt: skip
    return server_arguments(replace(settings, **changed), 30000)  # type: ignore[arg-type]


def test_the_layout_and_the_bases_format_choose_the_flags() -> None:
    shared = arguments(experts="SharedOuter", expert_formats=("FP8Block",))
    assert "--experts-shared-outer-loras" in shared
    assert shared[shared.index("--lora-backend") + 1] == "triton"
    assert shared[shared.index("--moe-runner-backend") + 1] == "triton"
    assert "--disable-shared-experts-fusion" in shared
    each = arguments(experts="PerExpert", expert_formats=("INT4",))
    assert "--no-experts-shared-outer-loras" in each
    assert each[each.index("--moe-runner-backend") + 1] == "marlin"
    packed = arguments(experts="SharedOuter", expert_formats=("MXFP4V4",))
    assert packed[packed.index("--moe-runner-backend") + 1] == "marlin"
    for left_alone in (arguments(), arguments(experts="Shared", expert_formats=("MXFP4V4",))):
        assert not {"--moe-runner-backend", "--experts-shared-outer-loras"} & set(left_alone)
    on_cpu = arguments(device="cpu", experts="SharedOuter", expert_formats=("INT4",))
    assert "--experts-shared-outer-loras" in on_cpu
    assert on_cpu.count("--lora-backend") == 1
    assert "--moe-runner-backend" not in on_cpu
