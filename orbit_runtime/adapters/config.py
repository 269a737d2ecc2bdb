"""The definition of an adapter: the few values that its maths, its injection and its files need."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Built from the manifest's adapter block by the caller.

    Example: `AdapterConfig(type="LoRA", targets=("q_proj", "v_proj"), rank=16, alpha=32.0)`
    """

    type: Literal["LoRA", "OFT", "Full"]
    """`Full`: no adapter; the model's own weights are trained."""
    targets: tuple[str, ...]
    """Suffixes of module names, matched at a dot. If empty, a loader uses the family's usual ones."""
    rank: int = 16
    """LoRA's rank."""
    alpha: float = 32.0
    """LoRA: the update is scaled by alpha / rank."""
    rslora: bool = False
    """LoRA: scale by alpha / sqrt(rank) instead (Kalajdzievski, arXiv 2312.03732)."""
    dropout: float = 0.0
    """LoRA: share of the inputs of A that a training pass drops."""
    block_size: int = 32
    """OFT: number of input features that are rotated together."""
    parametrization: Literal["CayleyNeumann", "Cayley"] = "CayleyNeumann"
    neumann_terms: int = 5
    coft: bool = False
    """OFT: every block of Q stays within `coft_eps / sqrt(blocks)` of 0 (Qiu et al., arXiv 2306.07280)."""
    coft_eps: float = 6e-5
    rotation_dtype: Literal["BF16", "F32"] = "BF16"
    """What R is rounded to before it multiplies. `F32` is only for comparisons with PEFT and cannot be published."""

    experts: Literal["Auto", "SharedOuter", "Shared", "PerExpert", "None"] = "Auto"
    """How routed experts share an adapter; `Auto`: LoRA `SharedOuter`, OFT `Shared`."""

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def expert_layout(self) -> str:
        """`experts` with `Auto` resolved."""
        if self.experts == "Auto":
            return "SharedOuter" if self.type == "LoRA" else "Shared"
        return self.experts
