"""What SGLang is asked to serve: its flags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from orbit_runtime.rollout.sglang_server import ServerSettings, lora_targets, server_arguments

ALL = ("gate_proj", "up_proj", "down_proj")


def test_the_attention_of_deepseek_v4_goes_by_names_that_sglang_takes() -> None:
    names = ("q_a_proj", "kv_proj", "q_b_proj", "o_b_proj")
    layers = [f"model.layers.0.self_attn.{name}" for name in names]
    assert lora_targets(layers) == ("kv_a_proj_with_mqa", "o_proj", "q_a_proj", "q_b_proj")


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
