"""A readable report of what an adapter matched in a model; plain values, which are also sent between processes.

Belongs here: the record and its table. Does not belong here: matching (`inject`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


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

    def text(self) -> str:
        lines = [f"{'target':<16} {'layers':>6} {'parameters':>12}  shapes"]
        for row in self.rows:
            shapes = ", ".join(f"{out}x{into}" + (f" ({n})" if n > 1 else "") for (out, into), n in row.shapes)
            experts = f", {row.experts} of them of experts: {self.expert_layout}" if row.experts else ""
            lines.append(f"{row.target:<16} {row.count:>6} {row.parameters:>12,}  {shapes}{experts}")
        lines.append(f"{'trainable':<16} {sum(row.count for row in self.rows):>6} {self.trainable_parameters:>12,}")
        return "\n".join(lines)


def join_reports(parts: Sequence[InjectReport]) -> InjectReport:
    """The report of a whole model, from those of its runs of layers."""
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
    return InjectReport(tuple(rows.values()), sum(part.trainable_parameters for part in parts), parts[0].expert_layout)
