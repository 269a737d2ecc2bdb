"""The composition of a model: every weight's name, shape and role, and the facts from which memory is planned.

Belongs here: the data types; the bytes that each on-disk format needs for a weight, and its tensor names. Does not
belong here: how a family is built (`families`), the bits and scales themselves (`quant`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

ENDINGS = (
    ".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_scale_inv", ".weight_scale_2",
    ".weight_global_scale", ".input_global_scale", ".input_scale", ".k_scale", ".v_scale", ".qweight", ".qzeros",
    ".scales", ".g_idx", "_blocks", "_scales", ".scale", ".weight",
)  # fmt: skip
"""Endings that formats use instead of `.weight`; longer ones precede those that they end with."""


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """Example: INT4 in groups of 32 is `StoredFormat("INT4", 4, (1, 32), 2, 8)`: 0.5625 bytes per parameter."""

    name: str
    """Its name in `model.precision`."""
    bits: int
    block: tuple[int, int] | None = None
    """Rows and columns under one scale; None without scales. 0 columns means a whole row."""
    scale_bytes: int = 0
    extra_bytes: int = 0
    """Bytes per tensor for shapes and global scales."""

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of one weight of this shape."""
        size = math.prod(shape) * self.bits // 8
        if self.block is None:
            return size
        rows, columns = shape[-2:]
        across = math.ceil(columns / self.block[1]) if self.block[1] else 1
        return size + math.ceil(rows / self.block[0]) * across * self.scale_bytes + self.extra_bytes


STORED: dict[str, StoredFormat] = {
    "BF16": StoredFormat("BF16", 16),
    "F32": StoredFormat("F32", 32),
    "I64": StoredFormat("I64", 64),
    # compressed-tensors pack-quantized: BF16 scales and an int32 [2] shape.
    "INT4/32": StoredFormat("INT4", 4, (1, 32), 2, 8),
    "INT4/128": StoredFormat("INT4", 4, (1, 128), 2, 8),
    # DeepSeek-V3 and Qwen3-FP8: 128 x 128 blocks; DeepSeek-V4 writes the scales as E8M0.
    "FP8/128": StoredFormat("FP8", 8, (128, 128), 4),
    "FP8/128/E8M0": StoredFormat("FP8", 8, (128, 128), 1),
    # compressed-tensors float-quantized by output channel, BF16 scales.
    "FP8/channel": StoredFormat("FP8", 8, (1, 0), 2),
    # ModelOpt: E4M3 scales, weight_scale_2 and input_scale in fp32.
    "NVFP4/16": StoredFormat("NVFP4", 4, (1, 16), 1, 8),
    "MXFP4/32": StoredFormat("MXFP4", 4, (1, 32), 1),
}
PRECISIONS = ("BF16", "FP8", "INT4", "NVFP4", "MXFP4")


Role = Literal[
    "embedding", "attention", "mixer", "dense_mlp", "shared_expert", "routed_expert", "router", "norm", "head", "mtp",
    "vision", "other",
]  # fmt: skip
EXPERT = "{e}"
"""Placeholder for an expert's number in a name."""
SGLANG_TARGETS = {"kv_proj": "kv_a_proj_with_mqa", "o_b_proj": "o_proj"}
"""DeepSeek-V4's projections that SGLang's LoRA has no name for → DeepSeek-V3's counterparts."""
SHARED_INPUTS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa", "kv_proj"),
    ("w1", "w3"),
)
"""Siblings with the same input. Engines fuse them, so they share one R."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight, or the corresponding weight of every expert of a layer.

    Example: `Weight("model.layers.3.mlp.experts.{e}.up_proj.weight", (2048, 7168), "routed_expert", 3, count=384,
    input="model.layers.3.mlp.experts.in", target="up_proj")`
    """

    name: str
    """Name in the checkpoint, before a format adds its own endings; `{e}` for an expert's number."""
    shape: tuple[int, ...]
    """Shape for one expert, if there are several. Linears are `[out, in]`."""
    role: Role
    layer: int | None = None
    count: int = 1
    """Number of experts. A name without `{e}` holds all of them in one tensor."""
    input: str = ""
    """Linears: name of the input. Linears with the same input can share one rotation."""
    target: str = ""
    """Linears: the module's name in `adapter.targets`."""
    dtype: str = "BF16"
    """Dtype of the weight if it is not quantised."""
    is_split: bool = True
    """Whether tensor parallelism divides it; otherwise every GPU holds all of it."""

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
class KVCacheSize:
    """Keys and values in BF16, all layers together (or in the model's own mixed format)."""

    bytes_per_token: float
    bytes_per_sequence: int = 0
    """Fixed cost of a sequence, whatever its length: sliding windows."""
    heads: int = 1
    """Number of ways in which tensor parallelism can divide it; 1: every rank holds all of it."""
    state_bytes: int = 0
    """Fixed cost of a sequence in fp32: states of layers that read no earlier keys."""
    own_bytes_per_token: float | None = None
    """Bytes per token in an engine of the trainer's process, which keeps whole windows and may expand latents; None: as
    in servers."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family's description of one configuration."""

    family: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    weights: tuple[Weight, ...]
    kv: KVCacheSize
    default_targets: tuple[str, ...]
    num_experts: int = 0
    experts_per_token: int = 0
    streams: int = 1
    """Residual streams: a layer's input is this many times the hidden size."""
    passes: str = ""
    """How a probe found that sequences must be computed; empty for families with a row."""

    def num_parameters(self, *roles: Role) -> int:
        """Parameters with these roles; without roles, of everything used in a forward pass: no MTP, no vision."""
        return sum(
            w.num_parameters for w in self.weights if (w.role in roles if roles else w.role not in ("mtp", "vision"))
        )

    def targets(self) -> tuple[str, ...]:
        """Every name that `adapter.targets` can contain."""
        return tuple({w.target: None for w in self.weights if w.is_linear and w.role not in ("mtp", "vision", "head")})


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight and the bytes that the checkpoint uses for it."""

    weight: Weight
    num_bytes: int
    """Bytes of all experts together, scales included."""
    format: str
    """`BF16`, `INT4` …"""
    block: tuple[int, int] | None = None
    """Rows and columns of the weight under one scale; None without scales, or if one covers at least a whole row."""


@dataclass(frozen=True)
class ModelFacts:
    """Everything that the planner knows about a model."""

    name: str
    source: str
    """Source of the facts: a shipped card, or headers."""
    precision: str
    """Required value of `model.precision`: the format of the routed experts, or of a dense model's linears."""
    architecture: Architecture
    weights: tuple[StoredWeight, ...]
    checkpoint_bytes: int
    """All files together, including parts that are never loaded."""
    unknown: tuple[str, ...] = field(default=())
    """Tensors of the checkpoint that the family does not know."""
    quantised_by: str = ""
    """`quant_method` of the checkpoint's configuration; empty in a card, and where nothing is packed."""

    def num_bytes(self, *roles: Role) -> int:
        return sum(s.num_bytes for s in self.weights if not roles or s.weight.role in roles)
