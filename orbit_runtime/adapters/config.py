"""The definition of an adapter, and a readable report of what it matched in a model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """Dtype to which R is rounded before it multiplies. `F32` is only for comparisons with PEFT and cannot be
    published.
    """

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


@dataclass(frozen=True, slots=True)
class ReportRow:
    """The matches of one target. `shapes` counts base shapes `(out, in)`; `parameters` counts shared ones once."""

    target: str
    count: int
    shapes: tuple[tuple[tuple[int, int], int], ...]
    parameters: int
    experts: int = 0
    """Number of matched layers of routed experts; all experts of a layer count once."""


@dataclass(frozen=True, slots=True)
class InjectReport:
    rows: tuple[ReportRow, ...]
    trainable_parameters: int
    expert_layout: str = "None"
    passes: str = ""
    """What of the model is left out, and how its passes run where that is not the usual way."""

    def text(self) -> str:
        lines = [self.passes] if self.passes else []
        lines += [f"{'target':<16} {'layers':>6} {'parameters':>12}  shapes"]
        for row in self.rows:
            shapes = ", ".join(f"{out}x{into}" + (f" ({n})" if n > 1 else "") for (out, into), n in row.shapes)
            experts = f", {row.experts} of them of experts: {self.expert_layout}" if row.experts else ""
            lines.append(f"{row.target:<16} {row.count:>6} {row.parameters:>12,}  {shapes}{experts}")
        lines.append(f"{'trainable':<16} {sum(row.count for row in self.rows):>6} {self.trainable_parameters:>12,}")
        return "\n".join(lines)


def join_reports(parts: Sequence[InjectReport]) -> InjectReport:
    """Combines the reports of a model's runs of layers."""
    rows: dict[str, ReportRow] = {}
    for row in (row for part in parts for row in part.rows if row.count):
        known = rows.get(row.target)
        if known is None:
            rows[row.target] = row
            continue
        shapes = Counter(dict(known.shapes)) + Counter(dict(row.shapes))
        rows[row.target] = ReportRow(
            row.target,
            known.count + row.count,
            tuple(sorted(shapes.items())),
            known.parameters + row.parameters,
            known.experts + row.experts,
        )
    return replace(parts[0], rows=tuple(rows.values()), trainable_parameters=sum(p.trainable_parameters for p in parts))
