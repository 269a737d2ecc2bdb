"""The dequantising kernel against the codecs, bit for bit: every code, every kind of scale, tiles across groups."""

from __future__ import annotations

import pytest
import torch
from fakes.kernel_weights import CASES, adversarial, operands_of, ordinary, stack_on
from fakes.packed_weights import bits

from orbit_runtime.quant.formats import FORMATS, format_of
from orbit_runtime.quant.kernels import launch
from orbit_runtime.quant.kernels.launch import WeightTile
from orbit_runtime.quant.kernels.tiles import INTERPRETED

N, K = 141, 384
FEW_ROWS = 45
"""For the smallest tiles and INT4, whose scales know no blocks of rows: a whole tile, and one beyond the last row."""
BLOCKS = (None, WeightTile(32, 16), WeightTile(16, 64), WeightTile(64, 128), WeightTile(256, 256))
"""Tiles inside a group, of whole groups, inside and across FP8 blocks, larger than the weight."""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_bit_is_the_codecs(case: str, block: WeightTile | None, device: str) -> None:
    weight = adversarial(case, FEW_ROWS if block == BLOCKS[1] and case.startswith("INT4") else N, K)
    expected = FORMATS[format_of(weight)].dequantize(weight)
    found = launch.dequantize(operands_of(weight, device), block=block)[0].cpu()
    same = bits(found) == bits(expected)
    if INTERPRETED.value and case.startswith("FP8"):
        # The interpreter reads E4M3's NaN as 480; a device reads it as NaN.
        assert int(expected.isnan().sum()) < 0.01 * expected.numel()
        same |= expected.isnan()
    assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} values differ"


@pytest.mark.parametrize("layout", ["INT4", "INT4Asymmetric", "FP8", "FP8Block", "NVFP4", "NVFP4ModelOpt", "MXFP4"])
def test_a_run_of_rows_of_every_expert(layout: str, device: str) -> None:
    weights = [ordinary(layout, 200, 128, seed) for seed in range(3)]
    _, operands = stack_on(weights, device)
    found = launch.dequantize(operands, first_row=128, num_rows=50).cpu()
    expected = torch.stack([FORMATS[layout].dequantize(weight)[128:178] for weight in weights])
    assert torch.equal(bits(found), bits(expected))
