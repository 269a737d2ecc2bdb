"""gpt-oss: all experts of a layer in one tensor, gate and up in alternating rows, biases, clamped activations, sinks.

MXFP4 tensors are `[E, 2I, N/32, 16]`, rows first; the BF16 ones are `[E, N, 2I]` and are transposed once.
"""

from __future__ import annotations

from typing import Any

import torch

from orbit_runtime.errors import ModelError
from orbit_runtime.model_info.quantization import QuantFormat
from orbit_runtime.policy.experts import Activation, interleaved
from orbit_runtime.policy.families.family import ExpertForm, Family, Projection, hidden, inner
from orbit_runtime.policy.reader import CheckpointReader
from orbit_runtime.policy.routing import softmax_over_chosen
from orbit_runtime.quant.experts import ExpertStack, split_gpt_oss
from orbit_runtime.quant.formats import FORMATS


def _two_inner(module: Any) -> int:
    return 2 * inner(module)


def _activation(module: Any) -> Activation:
    return interleaved(float(module.alpha), float(module.limit))


def _read_stacked(reader: CheckpointReader, quant: QuantFormat, name: str) -> tuple[ExpertStack, torch.Tensor]:
    layout = quant.layout_of(name)
    codec = FORMATS[layout]
    if layout == "MXFP4GptOss":
        tensors = {tensor: reader.read(tensor) for tensor in codec.tensor_names(name)}
        stack = split_gpt_oss(codec.from_checkpoint(tensors, name))
    elif layout == "BF16":
        stored = reader.read(name)
        if stored.dtype != torch.bfloat16 or stored.ndim != 3:
            raise ModelError(f"expected bfloat16 experts, found {stored.dtype} {list(stored.shape)}", where=name)
        stack = ExpertStack("BF16", {"weight": stored.transpose(1, 2).contiguous()})
    else:
        raise ModelError(
            f"gpt-oss experts in {layout} are not known to Orbit", where=name, fix="use MXFP4 as released, or BF16"
        )
    return stack, reader.read(f"{name}_bias")


GPT_OSS = Family(
    ExpertForm(
        (Projection("gate_up_proj", _two_inner, hidden), Projection("down_proj", hidden, inner)),
        _activation,
        _read_stacked,
    ),
    gate_weights=softmax_over_chosen,
)
