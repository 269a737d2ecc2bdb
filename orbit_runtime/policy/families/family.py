"""The row type of the families' table. Does not belong here: any one family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from orbit_runtime.model_info.quantization import QuantFormat
from orbit_runtime.policy.attention import PACKED, Mode
from orbit_runtime.policy.experts import Activation
from orbit_runtime.policy.reader import CheckpointReader
from orbit_runtime.policy.routing import GateWeights
from orbit_runtime.quant.experts import ExpertStack
from orbit_runtime.quant.linear import FrozenLinear

Size = Callable[[Any], int]
"""Size of a projection, from transformers' `…Experts`."""
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
    """Builds the activation from transformers' `…Experts`."""
    read_stacked: ReadStacked | None = None
    """If the checkpoint holds all experts of a layer in one tensor: (reader, format, module) → (stack, biases)."""


def _same(name: str) -> str:
    return name


def _by_index(_name: str, _leaf: str) -> None:
    return None


def _as_it_is(config: dict[str, Any]) -> dict[str, Any]:
    return config


@dataclass(frozen=True, slots=True)
class Family:
    """A model family."""

    experts: ExpertForm | None = None
    checkpoint_name: Callable[[str], str] = _same
    """Name of a module or parameter in transformers → its name in the checkpoint."""
    expert_sources: Callable[[str, str], Sequence[str] | None] = _by_index
    """(name of transformers' `…Experts`, projection) → the checkpoint's module of each expert. None where they are
    called `<name>.<index>.<projection>`, or have one tensor for all experts."""
    language_config: Callable[[dict[str, Any]], dict[str, Any]] = _as_it_is
    """config.json → the configuration of the language model, of a type that transformers knows."""
    left_out: tuple[str, ...] = ()
    """Regular expressions for names of tensors outside the language model; matched from the start."""
    no_targets: tuple[str, ...] = ()
    """Parts of linears' names that an adapter never targets, even if the last name matches a target."""
    refused_targets: Mapping[str, str] = field(default_factory=dict)
    """Targets that are linears of the model but must not be adapted, and the reason."""
    special_linears: Mapping[str, Callable[[FrozenLinear, nn.Module], nn.Module]] = field(default_factory=dict)
    """Class of a linear with arithmetic of its own → (its weight, the module) → the replacement module."""
    kept_linears: tuple[str, ...] = ()
    """Ends of names of linears that stay transformers' own, because code reads their weight or its dtype."""
    kept_fp32: tuple[str, ...] = ()
    """Parts of names of parameters that stay in fp32 for every compute dtype; routers always do."""
    gate_weights: GateWeights | None = None
    """How its routers weigh chosen experts; None if unknown, so that they cannot be given another choice."""
    mode: Mode = PACKED


DENSE = Family()


def hidden(module: Any) -> int:
    return int(getattr(module, "hidden_dim", None) or module.hidden_size)


def inner(module: Any) -> int:
    return int(getattr(module, "intermediate_dim", None) or module.intermediate_size)
