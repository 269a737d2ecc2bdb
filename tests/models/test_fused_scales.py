"""One scale for projections that SGLang fuses: seen in the files, given by a conversion."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from orbit_runtime.checkpoints.convert import convert
from orbit_runtime.checkpoints.target import Target
from orbit_runtime.errors import UnsupportedError
from orbit_runtime.rollout.fused_scales import check_fused_scales, find_unequal
from tests.integration.tiny_families import make_family


@pytest.mark.parametrize("layout", ["NVFP4", "NVFP4ModelOpt"])
def test_different_scales_are_named_and_a_conversion_gives_one(layout: str, tmp_path: Path) -> None:
    packed, plain = make_family(tmp_path, "qwen3_moe", layout)
    unequal = find_unequal(packed, keeps_fp8=True)
    queries = {f"model.layers.0.self_attn.{each}_proj" for each in "qkv"}
    assert queries in map(set, unequal)
    assert any(".experts.3.gate_proj" in group[0] for group in unequal)
    with pytest.raises(UnsupportedError, match=r"and \d+ more as one matrix with one scale") as caught:
        check_fused_scales(packed, keeps_fp8=False)
    assert caught.value.exit_code == 78
    convert(plain, tmp_path / "one", Target("NVFP4"), show=lambda *_: None)
    check_fused_scales(tmp_path / "one", keeps_fp8=False)


@pytest.mark.parametrize("layout", ["BF16", "INT4", "FP8", "FP8Block", "MXFP4"])
def test_scales_of_rows_groups_and_blocks_are_nobody_elses(layout: str, tmp_path: Path) -> None:
    packed, _ = make_family(tmp_path, "qwen3", layout)
    check_fused_scales(packed, keeps_fp8=False)


@pytest.mark.parametrize(
    ("family", "keeps_fp8", "is_refused"), [("qwen3", True, False), ("qwen3", False, True), ("qwen3_moe", True, True)]
)
def test_fp8_with_a_scale_for_a_whole_tensor_depends_on_the_servers_class(
    family: str, keeps_fp8: bool, is_refused: bool, tmp_path: Path
) -> None:
    packed, _ = make_family(tmp_path, family, "FP8")
    tensors = load_file(packed / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        tensors[name] = tensors[name].max().reshape(1)
    save_file(tensors, packed / "model.safetensors")
    if not is_refused:
        check_fused_scales(packed, keeps_fp8=keeps_fp8)
        return
    with pytest.raises(UnsupportedError, match="as one matrix with one scale") as caught:
        check_fused_scales(packed, keeps_fp8=keeps_fp8)
    assert (".experts." in str(caught.value)) == keeps_fp8
