"""What headers tell of a model is what a loaded policy tells of itself: by names alone, with no tensor read."""

from __future__ import annotations

from pathlib import Path

import pytest

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.policy import load_policy
from orbit_runtime.policy.facts import describe
from orbit_runtime.sides.checkpoint_facts import facts_of_checkpoint
from tests.integration.tiny_families import make_family

ADAPTERS = {
    "LoRA": AdapterConfig(type="LoRA", targets=(), rank=2, alpha=4.0),
    "LoRA beside experts": AdapterConfig(type="LoRA", targets=(), rank=2, alpha=4.0, experts="None"),
    "chosen": AdapterConfig(type="LoRA", targets=("o_proj",), rank=2, alpha=4.0),
    "whole name": AdapterConfig(type="LoRA", targets=("model.layers.0.self_attn.o_proj",), rank=2, alpha=4.0),
}


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3", "INT4"), ("qwen3_moe", "INT4"), ("qwen3_moe", "BF16"), ("deepseek_v3", "FP8Block"), ("kimi_k2", "INT4"),
     ("glm4_moe", "NVFP4"), ("gpt_oss", "MXFP4GptOss")],
)  # fmt: skip
def test_headers_tell_what_a_policy_tells(tmp_path: Path, family: str, layout: str) -> None:
    make_family(tmp_path, family, layout)
    for name, adapter in ADAPTERS.items():
        loaded = describe(load_policy(tmp_path / "packed", adapter))
        told = facts_of_checkpoint(tmp_path / "packed", adapter, loaded.compute_dtype)
        assert set(told.layers) == set(loaded.layers), name
        assert (told.adapter, told.precision, told.vocabulary, told.expert_formats) == (
            loaded.adapter, loaded.precision, loaded.vocabulary, loaded.expert_formats,
        ), name  # fmt: skip
        assert told.modules >= set(loaded.layers), name
        assert told.modules <= loaded.modules, sorted(told.modules - loaded.modules)[:5]
        if loaded.routed is not None:
            assert told.routed == loaded.routed, name
