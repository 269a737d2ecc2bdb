"""What a row of the families' table holds. Does not belong here: any one family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from orbit_runtime.model_info.quantization import QuantFormat
from orbit_runtime.policy.experts import Activation
from orbit_runtime.policy.reader import CheckpointReader
from orbit_runtime.policy.routing import GateWeights
from orbit_runtime.quant.experts import ExpertStack
from orbit_runtime.quant.linear import FrozenLinear

Size = Callable[[Any], int]
"""Of a projection, from transformers' `…Experts`."""
ReadStacked = Callable[[CheckpointReader, QuantFormat, str], tuple[ExpertStack, torch.Tensor | None]]


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear that every expert of a layer has. Example: `Projection("down_proj", hidden, inner)`."""

    name: str
    out_features: Size
    in_features: Size


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """How a family's routed experts are stored, and what they compute."""

    projections: tuple[Projection, ...]
    build_activation: Callable[[Any], Activation]
    """From transformers' `…Experts`."""
    read_stacked: ReadStacked | None = None
    """Where the checkpoint holds all experts of a layer in one tensor: (reader, format, module) → (stack, biases)."""


def _same(name: str) -> str:
    return name


def _as_it_is(config: dict[str, Any]) -> dict[str, Any]:
    return config


@dataclass(frozen=True, slots=True)
class Family:
    """A model family."""

    experts: ExpertForm | None = None
    checkpoint_name: Callable[[str], str] = _same
    """Name of a module or parameter in transformers → in the checkpoint."""
    language_config: Callable[[dict[str, Any]], dict[str, Any]] = _as_it_is
    """config.json → that of the language model, of a type that transformers knows."""
    left_out: tuple[str, ...] = ()
    """Expressions for the names of tensors that are not of the language model; matched from the start."""
    no_targets: tuple[str, ...] = ()
    """Parts of names of linears that an adapter never targets, even where their last name is a target's."""
    refused_targets: Mapping[str, str] = field(default_factory=dict)
    """Targets that are linears of the model, but may not be adapted, and why."""
    special_linears: Mapping[str, Callable[[FrozenLinear, nn.Module], nn.Module]] = field(default_factory=dict)
    """Class of a linear with arithmetic of its own → (its weight, the module) → what stands in its place."""
    kept_fp32: tuple[str, ...] = ()
    """Parts of names of parameters that stay in fp32 whatever the compute dtype is; routers always do."""
    gate_weights: GateWeights | None = None
    """How its routers weigh experts that were chosen; None: not known, so that no other choice can be given to them."""
    packs: bool = True
    """Several sequences may stand in one row, told apart by attention alone."""


DENSE = Family()


def hidden(module: Any) -> int:
    return int(getattr(module, "hidden_dim", None) or module.hidden_size)


def inner(module: Any) -> int:
    return int(getattr(module, "intermediate_dim", None) or module.intermediate_size)
