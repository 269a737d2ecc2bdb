"""Headers of packed weights: what the codecs write is accepted, and every tensor that is missing or odd is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from orbit_runtime.checkpoints.tensor_files import CODES
from orbit_runtime.errors import ModelError
from orbit_runtime.model_info.headers import TensorInfo
from orbit_runtime.model_info.layouts import read_linear, read_linears
from orbit_runtime.model_info.quantization import PRECISIONS, QuantFormat
from orbit_runtime.quant.formats import FORMATS

LAYOUTS = [layout for layout in PRECISIONS if layout not in ("BF16", "GPTQ", "GPTQv2", "AWQ", "MXFP4GptOss")]
Held = dict[str, tuple[str, TensorInfo]]


def info(dtype: str, *shape: int) -> tuple[str, TensorInfo]:
    return ("file", TensorInfo(dtype, shape, 0, 0))


def written(layout: str, rows: int = 256, columns: int = 384) -> Held:
    """What the codec writes for a weight, by its own account."""
    codec = FORMATS[layout]
    assert codec.quantize is not None
    assert codec.to_checkpoint is not None
    arguments = (32,) if layout.startswith("INT4") else ()
    weight = codec.quantize(torch.randn(rows, columns), *arguments)
    parts = codec.to_checkpoint(weight)
    names = dict(zip([f"m.{name}" for name in parts], parts.values(), strict=True))
    return {name: info(CODES[part.dtype], *part.shape) for name, part in names.items()}


READ_ONLY: dict[str, Held] = {
    "GPTQ": {
        "m.qweight": info("I32", 48, 256), "m.qzeros": info("I32", 12, 32), "m.scales": info("F16", 12, 256),
        "m.g_idx": info("I32", 384),
    },
    "AWQ": {"m.qweight": info("I32", 384, 32), "m.qzeros": info("I32", 12, 32), "m.scales": info("F16", 12, 256)},
    "MXFP4GptOss": {"m_blocks": info("U8", 4, 256, 12, 16), "m_scales": info("U8", 4, 256, 12)},
}  # fmt: skip


def held(layout: str) -> Held:
    return dict(READ_ONLY.get(layout.removesuffix("v2"), {})) or written(layout)


def format_of(layout: str) -> QuantFormat:
    return QuantFormat(PRECISIONS[layout], layout=layout, targets=("m",))


@pytest.mark.parametrize("layout", [layout for layout in PRECISIONS if layout != "BF16"])
def test_every_layout_is_recognised_and_every_missing_or_odd_tensor_is_named(layout: str) -> None:
    linear = read_linears(held(layout), format_of(layout), config="config.json")["m"]
    assert (linear.layout, linear.rows, linear.columns) == (layout, 256, 384)
    assert set(linear.tensors) == set(held(layout))
    for name in held(layout):
        missing = held(layout)
        del missing[name]
        with pytest.raises(ModelError):
            read_linear(layout, "m", missing)
        for odd in (("F64", (256, 384)), ("U8", (3,)), (held(layout)[name][1].dtype, (7, 5, 3))):
            spoilt = held(layout)
            spoilt[name] = info(odd[0], *odd[1])
            with pytest.raises(ModelError) as caught:
                read_linear(layout, "m", spoilt)
            assert "file: m" in str(caught.value)
            assert caught.value.fix


@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_of_a_module_that_the_config_leaves_alone_are_refused(layout: str) -> None:
    alone = replace(format_of(layout), ignore=("m",))
    with pytest.raises(ModelError, match=r"config\.json leaves m in BF16"):
        read_linears(written(layout), alone, config="config.json")


def test_a_scale_without_codes_is_refused() -> None:
    stray = {"m.weight": info("BF16", 4, 4), "m.weight_scale": info("BF16", 4, 1)}
    with pytest.raises(ModelError, match="no codes of m"):
        read_linears(stray, QuantFormat("BF16"), config="config.json")
