"""Where do two sides part? The first point of the forward pass that differs, and the tensor or constant behind it.

Belongs here: comparing two snapshots. Does not belong here: taking them (`policy.snapshot`, `sglang_plugin.taps`),
whether they differ too much in the end (`preflight`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from orbit_runtime.policy.snapshot import ROTARY, Snapshot

FLOOR_FACTOR = 8.0
"""A point differs where it does by more than this many times the trainer's difference from itself."""
SMALLEST_DIFFERENCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""And by more than this: two libraries order their sums differently, and the floor of one can be 0."""
CONSTANT_TOLERANCE = 1e-5
LISTED = 8
"""Tensors that are told with their values; one wrong shard can change hundreds."""


@runtime_checkable
class Tapped(Protocol):
    """A copy of an engine whose layers can be looked at, if it says so."""

    @property
    def is_tapped(self) -> bool: ...

    def snapshot(self, token_ids_T: Sequence[int], adapter: str | None) -> Snapshot: ...


@dataclass(frozen=True)
class Cause:
    """Something that the two sides hold differently."""

    kind: str
    """`base tensor`, `adapter tensor` or `constant`."""
    name: str
    detail: str

    def to_json(self) -> dict[str, str]:
        return {"kind": self.kind, "name": self.name, "detail": self.detail}


@dataclass(frozen=True)
class Location:
    """What two snapshots say about a difference."""

    point: str | None
    """The first that differs; None: none does."""
    difference: float
    """There: max |a - b| / RMS of the trainer's values."""
    limit: float
    causes: tuple[Cause, ...]
    """In the order of the forward pass; empty: both sides hold the same values, so one computes with them wrongly."""
    not_compared: tuple[str, ...]
    """Base tensors that only one side could tell: packed in the engine, or routed experts."""

    @property
    def found(self) -> bool:
        return self.point is not None or bool(self.causes)

    def sentence(self) -> str:
        """Example: `first at model.layers.2.mlp.up_proj (0.013, limit 2e-05): base tensor … differs: 1 of 32768 …`."""
        where = (
            f"first at {self.point} ({self.difference:.2g}, limit {self.limit:.2g})"
            if self.point
            else "in no layer beyond the floor"
        )
        if not self.causes:
            return where if not self.point else f"{where}; both sides hold the same tensors and constants there"
        first, more = self.causes[0], len(self.causes) - 1
        return f"{where}: {first.kind} {first.name}: {first.detail}" + (f"; and {more} more" if more else "")

    def to_json(self) -> dict[str, Any]:
        causes = [cause.to_json() for cause in self.causes]
        return {
            "point": self.point,
            "difference": self.difference,
            "limit": self.limit,
            "causes": causes,
            "not_compared": list(self.not_compared),
            "sentence": self.sentence(),
        }


def locate(trainer: Snapshot, again: Snapshot, engine: Snapshot, *, dtype: torch.dtype, group: int | None) -> Location:
    """Compares every point in the trainer's order, then every tensor and constant that both sides tell.

    Args:
        again: the trainer's own snapshot in another batch shape: its floor, point by point.
        group: columns of one scale of the packed base, to say whether a difference is one group's.
    """
    point, difference, limit = None, 0.0, SMALLEST_DIFFERENCE[dtype]
    for name, values in trainer.points.items():
        if name not in engine.points:
            continue
        allowed = max(SMALLEST_DIFFERENCE[dtype], FLOOR_FACTOR * _difference(values, again.points[name]))
        found = _difference(values, engine.points[name])
        if not found <= allowed:
            point, difference, limit = name, found, allowed
            break
    order = {name: number for number, name in enumerate(trainer.points)}
    shared = [name for name in trainer.digests if name in engine.digests]
    differing = [name for name in shared if trainer.digests[name] != engine.digests[name]]
    differing.sort(key=lambda name: _place(name, order))
    causes = [*_tensor_causes(differing, trainer, engine, group), *_constant_causes(trainer, engine)]
    causes += _router_causes(trainer, engine)
    causes.sort(key=lambda cause: _place(cause.name, order))
    missing = tuple(name for name in trainer.digests if name not in engine.digests)
    return Location(point, difference, limit, tuple(causes), missing)


def _difference(a: Tensor, b: Tensor) -> float:
    """max |a - b| relative to the RMS of `a`; NaN and another shape count as infinitely far."""
    rows = min(len(a), len(b))
    a, b = a[:rows].flatten(1), b[:rows].flatten(1)
    if a.shape != b.shape or not torch.isfinite(b).all():
        return float("inf")
    scale = a.square().mean().sqrt().item()
    return ((a - b).abs().max() / max(scale, torch.finfo(torch.float32).tiny)).item()


def _tensor_causes(names: Sequence[str], trainer: Snapshot, engine: Snapshot, group: int | None) -> list[Cause]:
    listed = names[:LISTED]
    ours, theirs = (trainer.values(listed), engine.values(listed)) if listed else ({}, {})
    return [
        Cause(_kind(name), name, _values_detail(name, ours, theirs, group) if name in ours else "another digest")
        for name in names
    ]


def _kind(name: str) -> str:
    return "adapter tensor" if name.rpartition(".")[2] not in ("weight", "bias") else "base tensor"


def _values_detail(name: str, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], group: int | None) -> str:
    a, b = ours[name], theirs[name]
    if a.shape != b.shape:
        return f"{tuple(a.shape)} in the trainer, {tuple(b.shape)} in the engine"
    unequal = (a != b).nonzero()
    count = f"{len(unequal)} of {a.numel()} values differ"
    ratio = _common_ratio(a, b)
    if ratio is not None:
        return f"{count}; the engine's are {ratio:.4g} times the trainer's"
    if a.dim() == 2 and torch.equal(a.mT.contiguous().view(-1), b.reshape(-1)):
        return f"{count}; the engine's are the trainer's transposed"
    first = tuple(int(at) for at in unequal[0])
    where = f"first at {list(first)}: {a[first].item():.6g} in the trainer, {b[first].item():.6g} in the engine"
    if a.dim() == 2 and group and len(unequal) > 1:
        rows, groups = unequal[:, 0].unique(), (unequal[:, 1] // group).unique()
        if len(rows) == len(groups) == 1:
            start = int(groups[0]) * group
            return f"{count}, all in row {int(rows[0])}, columns {start} to {start + group - 1}: one group's scale"
    return f"{count}, {where}"


def _common_ratio(a: Tensor, b: Tensor) -> float | None:
    kept = a != 0
    if not kept.any() or not torch.equal(b != 0, kept):
        return None
    ratios = b[kept] / a[kept]
    ratio = ratios.median()
    return ratio.item() if bool(((ratios - ratio).abs() <= 1e-3 * ratio.abs()).all()) and ratio != 1 else None


def _constant_causes(trainer: Snapshot, engine: Snapshot) -> list[Cause]:
    causes = []
    for name, ours in trainer.constants.items():
        theirs = engine.constants.get(name)
        if theirs is None:
            continue
        rows = min(len(ours), len(theirs)) if ours.dim() else None
        a, b = (ours[:rows], theirs[:rows]) if rows is not None else (ours, theirs)
        if a.shape == b.shape and bool(((a - b).abs() <= CONSTANT_TOLERANCE * a.abs().clamp(min=a.abs().max())).all()):
            continue
        detail = f"{a.item():.6g} in the trainer, {b.item():.6g} in the engine" if a.dim() == 0 else _angles(a, b)
        causes.append(Cause("constant", name, detail))
    return causes


def _router_causes(trainer: Snapshot, engine: Snapshot) -> list[Cause]:
    """A router's scores choose experts: rounded to BF16, near ties fall otherwise."""
    return [
        Cause("constant", f"{name}.precision", "fp32 scores in the trainer, rounded to BF16 in the engine")
        for name, ours in trainer.points.items()
        if name.endswith(".gate") and name in engine.points and _is_bf16(engine.points[name]) and not _is_bf16(ours)
    ]


def _is_bf16(values: Tensor) -> bool:
    return torch.equal(values.bfloat16().float(), values)


def _angles(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape:
        return f"{tuple(a.shape)} in the trainer, {tuple(b.shape)} in the engine"
    far = (a - b).abs().max().item()
    return f"up to {far:.2g} apart: another base, scaling or kind of rotary embedding"


def _place(name: str, order: Mapping[str, int]) -> tuple[int, str]:
    """Where in the forward pass a tensor or constant is first used."""
    owner = name.rpartition(".")[0]
    if name == ROTARY:
        owner = next((point for point in order if point.endswith(".query")), "")
    if owner not in order:
        # The norms of queries and keys have no point of their own: they show in what attention is given.
        owner = owner.replace("q_norm", "query").replace("k_norm", "key")
    return order.get(owner, len(order)), name
