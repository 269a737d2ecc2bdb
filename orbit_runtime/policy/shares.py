"""The part of a model that a process holds: columns and rows of its linears, some of its experts, some of its layers.

Matrices are divided as in Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3): projections that read the hidden
state by rows (heads, inner columns), those that write it by columns, so that nothing is exchanged between them.

Belongs here: which parts are cut, and where. Does not belong here: communication between processes
(`training.megatron`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from orbit_runtime.adapters.part import WHOLE, WeightPart
from orbit_runtime.errors import UnsupportedError
from orbit_runtime.model_info.stages import stage_layers
from orbit_runtime.policy.attention import decoder_of
from orbit_runtime.quant.experts import ExpertStack
from orbit_runtime.quant.formats import Weight, slice_weight

READ_HIDDEN = {"q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj"}
WRITE_HIDDEN = {"o_proj", "down_proj"}
HELD_WHOLE = {"q_a_proj", "kv_a_proj_with_mqa"}
"""Small, and every head needs their result."""
PER_HEAD = {"sinks"}
"""Parameters with one entry per head."""


BEFORE_LAYERS = "embed_tokens"
BEHIND_LAYERS, LAST_NORM = {"lm_head"}, "norm"


@dataclass(frozen=True, slots=True)
class Share:
    """Example: the second of two processes that divide matrices and experts: `Share(tensor=(1, 2), expert=(1, 2))`."""

    tensor: tuple[int, int] = (0, 1)
    """Index among the processes that divide matrices, and their number."""
    expert: tuple[int, int] = (0, 1)
    """The same for routed experts."""
    stage: tuple[int, int] = (0, 1)
    """The same for runs of layers. The first holds the embedding, the last the final norm and the output layer."""
    layers: range | None = None
    """Decoder layers, once their number is known (`of_layers`); None for all."""

    def of_layers(self, count: int) -> Share:
        """The share for a model with `count` layers.

        Raises:
            UnsupportedError: there are more stages than layers.
        """
        return self if self.stage[1] == 1 else replace(self, layers=stage_layers(count, *self.stage))

    def holds(self, name: str) -> bool:
        """Whether the module or parameter is in this process's layers, in an end that it holds, or in neither."""
        place = name.partition(".layers.")[2].partition(".")[0]
        if place.isdigit():
            return self.layers is None or int(place) in self.layers
        parts = name.split(".")
        if BEFORE_LAYERS in parts:
            return self.is_first
        return self.is_last or not (parts[0] in BEHIND_LAYERS or parts[1:2] == [LAST_NORM])

    @property
    def is_first(self) -> bool:
        return self.stage[0] == 0

    @property
    def is_last(self) -> bool:
        return self.stage[0] == self.stage[1] - 1

    def part_of(self, name: str, shape: tuple[int, int]) -> WeightPart:
        """The part of a linear outside the routed experts.

        Raises:
            UnsupportedError: Orbit does not divide this kind of linear, or its size is not divisible among the
            processes.
        """
        if not (".self_attn." in name or ".mlp." in name):
            return WeightPart(shape=shape, group="none")
        if self.tensor[1] == 1:
            return WeightPart(shape=shape)
        leaf = name.rpartition(".")[2]
        if leaf in READ_HIDDEN:
            return WeightPart(rows=self._range(name, "rows", shape[0]), shape=shape)
        if leaf in WRITE_HIDDEN:
            return WeightPart(columns=self._range(name, "columns", shape[1]), shape=shape)
        if leaf in HELD_WHOLE:
            return WeightPart(shape=shape)
        raise UnsupportedError(
            f"{name} is a projection that Orbit does not divide among GPUs",
            where="spec.training.parallel.tensor",
            fix="write 1",
        )

    def _range(self, name: str, axis: str, size: int) -> slice:
        held = _divide(name, axis, size, self.tensor, "tensor")
        return slice(held.start, held.stop)

    def experts_of(self, name: str, count: int) -> range:
        """The experts of a layer that this process holds."""
        return _divide(name, "experts", count, self.expert, "expert")

    def cut_per_head(self, name: str, value: torch.Tensor) -> torch.Tensor:
        if name.rpartition(".")[2] not in PER_HEAD or self.tensor[1] == 1:
            return value
        return value[self._range(name, "heads", value.shape[0])].clone()


def _divide(name: str, axis: str, size: int, share: tuple[int, int], field: str) -> range:
    rank, count = share
    if size % count:
        raise UnsupportedError(
            f"{name} has {size} {axis}, which {count} GPUs do not divide evenly",
            where=f"spec.training.parallel.{field}",
            fix=f"write a divisor of {size}",
        )
    return range(rank * size // count, (rank + 1) * size // count)


UNDIVIDED = Share()
"""The whole model."""


class Elsewhere(nn.Module):
    """Replaces a module that another process computes: returns its input."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.attention_type = getattr(module, "attention_type", None)

    def forward(self, given: torch.Tensor | None = None, *_: Any, **named: Any) -> torch.Tensor:
        return given if given is not None else named["hidden_states"]


def drop_modules(model: nn.Module, share: Share) -> None:
    """Removes what other processes hold from the model; layers keep their numbers."""
    decoder = decoder_of(model)
    if share == UNDIVIDED:
        return
    for index in range(len(decoder.layers)):
        if share.layers is not None and index not in share.layers:
            decoder.layers[index] = Elsewhere(decoder.layers[index])
    if not share.is_first:
        decoder.embed_tokens = Elsewhere(decoder.embed_tokens)
    if not share.is_last:
        decoder.norm, model.lm_head = Elsewhere(decoder.norm), Elsewhere(model.lm_head)  # type: ignore[assignment]


def cut_weight(weight: Weight, part: WeightPart) -> Weight:
    """The part as a copy of its own, so that the rest is freed."""
    if part.rows == WHOLE and part.columns == WHOLE:
        return weight
    return slice_weight(weight, part.rows, part.columns, owned=True)


def cut_bias(bias: torch.Tensor | None, part: WeightPart, share: Share) -> torch.Tensor | None:
    """The bias of this process. If a linear is divided by columns, only one process adds the bias to the sum."""
    if bias is None or (part.columns != WHOLE and share.tensor[0] != 0):
        return None
    return bias[part.rows].clone()


def cut_experts(stack: ExpertStack, experts: range) -> ExpertStack:
    held = slice(experts.start, experts.stop)
    return ExpertStack(stack.format, {key: tensor[held].clone() for key, tensor in stack.tensors.items()})
