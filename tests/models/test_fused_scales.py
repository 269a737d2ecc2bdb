"""One scale for projections that SGLang fuses: seen in the files, given by a conversion."""

from __future__ import annotations

from pathlib import Path

import pytest

from orbit_runtime.checkpoints.convert import convert
from orbit_runtime.checkpoints.target import Target
from orbit_runtime.errors import UnsupportedError
from orbit_runtime.rollout.fused_scales import check_fused_scales, find_unequal
from tests.integration.tiny_families import make_family


@pytest.mark.parametrize("layout", ["NVFP4", "NVFP4ModelOpt"])
def test_different_scales_are_named_and_a_conversion_gives_one(layout: str, tmp_path: Path) -> None:
    packed, plain = make_family(tmp_path, "qwen3_moe", layout)
    unequal = find_unequal(packed)
    queries = {f"model.layers.0.self_attn.{each}_proj" for each in "qkv"}
    assert queries in map(set, unequal)
    assert any(".experts.3.gate_proj" in group[0] for group in unequal)
    with pytest.raises(UnsupportedError, match=r"and \d+ more as one matrix with one scale") as caught:
        check_fused_scales(packed)
    assert caught.value.exit_code == 78
    convert(plain, tmp_path / "one", Target("NVFP4"), show=lambda *_: None)
    check_fused_scales(tmp_path / "one")


@pytest.mark.parametrize("layout", ["BF16", "INT4", "FP8", "FP8Block", "MXFP4"])
def test_scales_of_rows_groups_and_blocks_are_nobody_elses(layout: str, tmp_path: Path) -> None:
    packed, _ = make_family(tmp_path, "qwen3", layout)
    check_fused_scales(packed)
