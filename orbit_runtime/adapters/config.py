"""What an adapter is: the few values that its maths, its injection and its files need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Built from the manifest's adapter block by the caller.

    Example: `AdapterConfig(type="LoRA", targets=("q_proj", "v_proj"), rank=16, alpha=32.0)`
    """

    type: Literal["LoRA", "OFT"]
    targets: tuple[str, ...]
    """Suffixes of module names, matched at a dot."""
    rank: int = 16
    """LoRA."""
    alpha: float = 32.0
    """LoRA: the update is scaled by alpha / rank."""
    block_size: int = 32
    """OFT: the input is rotated in blocks of so many features."""
    parametrization: Literal["CayleyNeumann", "Cayley"] = "CayleyNeumann"
    neumann_terms: int = 5
    rotation_dtype: Literal["BF16", "F32"] = "BF16"
    """What R is rounded to before it multiplies. `F32` is for comparisons with PEFT only: it cannot be published."""

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank
