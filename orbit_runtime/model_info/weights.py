"""What a model is made of: every weight's name, shape and role, and the facts that memory is planned from.

Belongs here: the nouns. Does not belong here: how a family is built (`families`), how a format stores (`stored`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from orbit_runtime.model_info.stored import StoredFormat

Role = Literal[
    "embedding", "attention", "dense_mlp", "shared_expert", "routed_expert", "router", "norm", "head", "mtp", "vision",
    "other",
]  # fmt: skip
EXPERT = "{e}"
"""Stands in a name for an expert's number."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight, or the same one of every expert of a layer.

    Example: `Weight("model.layers.3.mlp.experts.{e}.up_proj.weight", (2048, 7168), "routed_expert", 3, count=384,
    input="model.layers.3.mlp.experts.in", target="up_proj")`
    """

    name: str
    """As in the checkpoint, before a format adds its own endings; `{e}` for an expert's number."""
    shape: tuple[int, ...]
    """Of one expert, where there are several. Linears are `[out, in]`."""
    role: Role
    layer: int | None = None
    count: int = 1
    """Experts. A name without `{e}` holds all of them in one tensor."""
    input: str = ""
    """Linears: the name of what goes in. Linears that share it can share one rotation."""
    target: str = ""
    """Linears: what the module is called in `adapter.targets`."""
    dtype: str = "BF16"
    """Of a weight that is not quantised."""
    is_split: bool = True
    """Whether tensor parallelism divides it; the rest exists whole on every GPU."""

    @property
    def is_linear(self) -> bool:
        return bool(self.input)

    @property
    def num_parameters(self) -> int:
        return math.prod(self.shape) * self.count

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values in BF16, all layers together (or in the model's own mixed format)."""

    bytes_per_token: float
    bytes_per_sequence: int = 0
    """What a sequence takes however long it is: sliding windows."""
    heads: int = 1
    """How many ways tensor parallelism can divide it; 1: every rank holds all of it."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family's description of one configuration."""

    family: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    weights: tuple[Weight, ...]
    kv: KVCache
    default_targets: tuple[str, ...]
    num_experts: int = 0
    experts_per_token: int = 0
    streams: int = 1
    """Residual streams: a layer's input is this many times the hidden size."""

    def num_parameters(self, *roles: Role) -> int:
        """Of these roles, or without any given, of all that takes part in a forward pass: no MTP, no vision."""
        return sum(
            w.num_parameters for w in self.weights if (w.role in roles if roles else w.role not in ("mtp", "vision"))
        )

    def targets(self) -> tuple[str, ...]:
        """Every name that `adapter.targets` can hold."""
        found = {w.target: None for w in self.weights if w.is_linear and w.role not in ("mtp", "vision", "head")}
        return tuple(found)


StorageRule = Callable[[Weight], StoredFormat]


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight and what the checkpoint spends on it."""

    weight: Weight
    num_bytes: int
    """Of all experts together, scales included."""
    format: str
    """`BF16`, `INT4` …"""
    block: tuple[int, int] | None = None
    """Rows and columns of the weight under one scale; None: no scales, or one for at least a whole row."""


@dataclass(frozen=True)
class ModelFacts:
    """All that the planner knows about a model."""

    name: str
    source: str
    """Where the facts come from: a shipped card, or headers."""
    precision: str
    """What `model.precision` must say: the format of the routed experts, or of the linears of a dense model."""
    architecture: Architecture
    weights: tuple[StoredWeight, ...]
    checkpoint_bytes: int
    """All files together, with what is never loaded."""
    unknown: tuple[str, ...] = field(default=())
    """Tensors of the checkpoint that the family does not know."""

    def num_bytes(self, *roles: Role) -> int:
        return sum(s.num_bytes for s in self.weights if not roles or s.weight.role in roles)
