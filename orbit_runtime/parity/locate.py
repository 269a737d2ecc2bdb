"""Finds where two sides diverge: the first point of the forward pass that differs, and the tensor or constant that
causes it.

Two sides count as equal only if the engine reported every point and constant that the trainer has: missing ones are
named, and do not count as agreement.

Belongs here: comparing two snapshots. Does not belong here: taking them (`policy.snapshot`, `sglang_plugin.taps`),
whether the resulting difference is too large (`preflight`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from orbit_runtime.adapters.tensorfile import tensor_digest
from orbit_runtime.policy.snapshot import ROTARY, Snapshot, SnapshotPart

FLOOR_FACTOR = 8.0
"""A point differs if its difference exceeds this multiple of the trainer's difference from itself."""
SMALLEST_DIFFERENCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}
"""Smallest difference that counts: two libraries order their sums differently, and one side's floor can be 0."""
CONSTANT_TOLERANCE = 1e-5
SHOWS_AT = {
    "q_norm": "query", "k_norm": "key", "q_a_layernorm": "q_b_proj", "kv_a_layernorm": "attended",
    "kv_b_proj": "attended",
}  # fmt: skip
"""Modules whose results are not points, and the point that first depends on each."""
MOST_REROUTED = 0.2
"""Share of a model's expert choices that rounding may change: twice what was found between training and inference
(about 10 % of routers chose other experts for a token, Qwen3-30B-A3B, arXiv 2510.11370). Above it, the two sides choose
by different rules."""
LISTED = 8
"""Number of tensors reported with their values; one wrong shard can change hundreds."""


@runtime_checkable
class InspectableCopy(Protocol):
    """A copy of an engine whose layers can be inspected, if it supports that."""

    @property
    def is_tapped(self) -> bool: ...

    def snapshot(self, token_ids_T: Sequence[int], adapter: str | None) -> Snapshot: ...


@dataclass(frozen=True)
class Cause:
    """Something whose value differs between the two sides."""

    kind: str
    """`base tensor`, `adapter tensor` or `constant`."""
    name: str
    detail: str

    def to_json(self) -> dict[str, str]:
        return {"kind": self.kind, "name": self.name, "detail": self.detail}


@dataclass(frozen=True)
class Location:
    """The difference between two snapshots."""

    point: str | None
    """The first point that differs; None if none does."""
    difference: float
    """max |a - b| / RMS of the trainer's values, at that point."""
    limit: float
    causes: tuple[Cause, ...]
    """In the order of the forward pass; empty if all tensors and constants that both sides reported are equal."""
    missing: tuple[str, ...]
    """Points and constants that the engine did not report, in the trainer's order."""
    not_compared: tuple[str, ...]
    """Tensors whose values the engine could not report, such as packed experts; their layers' results are points."""
    rerouted: float | None = None
    """Share of tokens and layers for which the trainer's routers would choose experts other than the engine's choice,
    with which both sides computed; None if each side used its own choice."""

    @property
    def found(self) -> bool:
        return self.point is not None or bool(self.causes) or self._chooses_otherwise

    @property
    def _chooses_otherwise(self) -> bool:
        return self.rerouted is not None and not self.rerouted <= MOST_REROUTED

    @property
    def is_clear(self) -> bool:
        """Whether everything that the trainer computes was compared, and nothing differs."""
        return not self.found and not self.missing

    def sentence(self) -> str:
        """Example: `first at model.layers.2.mlp.up_proj (0.013, limit 2e-05): base tensor … differs: 1 of 32768 …`."""
        missing = _listed(self.missing, "the engine did not report")
        return "; ".join(filter(None, (self._where(), missing, self._open(), self._choices())))

    def verdict(self) -> str:
        """Example: `they differ first at …`, or `not all layers were compared: the engine did not report …`."""
        words = "they differ " if self.found else "" if self.is_clear else "not all layers were compared: "
        return words + self.sentence()

    def _where(self) -> str:
        if self.point is None and not self.causes:
            return "" if self.missing else "in no layer beyond the floor"
        where = (
            f"first at {self.point} ({self.difference:.2g}, limit {self.limit:.2g})" if self.point else "in no layer"
        )
        if not self.causes:
            return where if self.not_compared else f"{where}; both sides hold the same tensors and constants"
        first, more = self.causes[0], len(self.causes) - 1
        return f"{where}: {first.kind} {first.name}: {first.detail}" + (f"; and {more} more" if more else "")

    def _open(self) -> str:
        return _listed(self.not_compared, "not compared value by value:")

    def _choices(self) -> str:
        if not self.rerouted:
            return ""
        words = f"through the engine's experts, which the trainer's routers do not choose in {self.rerouted:.2%}"
        if not self._chooses_otherwise:
            return words
        return f"{words}, more than {MOST_REROUTED:.0%}: they choose by another rule"

    def to_json(self) -> dict[str, Any]:
        causes = [cause.to_json() for cause in self.causes]
        return {
            "point": self.point,
            "difference": self.difference,
            "limit": self.limit,
            "causes": causes,
            "missing": list(self.missing),
            "not_compared": list(self.not_compared),
            "rerouted": self.rerouted,
            "sentence": self.sentence(),
        }


def locate(trainer: Snapshot, again: Snapshot, engine: Snapshot, *, dtype: str, group: int | None) -> Location:
    """Compares every point in the trainer's order, then every tensor and constant that both sides report.

    Args:
        again: the trainer's own snapshot in another batch shape: its floor, point by point.
        group: columns per scale of the packed base, used to say whether a difference is confined to one group.
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
    differing, unknown = _compare_tensors(trainer, engine)
    names = sorted(differing, key=lambda name: _place(name, order))
    causes = [*_tensor_causes(names, differing, trainer, engine, group), *_constant_causes(trainer, engine)]
    causes += [*_router_causes(trainer, engine), *_copy_causes(trainer)]
    causes.sort(key=lambda cause: _place(cause.name, order))
    return Location(point, difference, limit, tuple(causes), _missing(trainer, engine), unknown, _rerouted(trainer))


def _rerouted(trainer: Snapshot) -> float | None:
    """Share of differing expert sets; the order of a token's experts does not matter."""
    if trainer.routed_TLC is None or trainer.preferred_TLC is None:
        return None
    given, own = (np.sort(chosen, axis=-1) for chosen in (trainer.routed_TLC, trainer.preferred_TLC))
    return float((given != own).any(-1).mean())


def _missing(trainer: Snapshot, engine: Snapshot) -> tuple[str, ...]:
    held = engine.points.keys() | engine.constants.keys()
    return tuple(
        name
        for name in (*trainer.points, *trainer.constants)
        if name not in held and not any(name.startswith(f"{absent}.") for absent in engine.absent)
    )


def _listed(names: Sequence[str], words: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{words} {', '.join(names[:LISTED])}{more}"


def _difference(a: Tensor, b: Tensor) -> float:
    """max |a - b| relative to the RMS of `a`; infinite for NaN or different shapes."""
    a, b = a.flatten(1), b.flatten(1)
    if a.shape != b.shape or not torch.isfinite(b).all():
        return float("inf")
    scale = a.square().mean().sqrt().item()
    return ((a - b).abs().max() / max(scale, torch.finfo(torch.float32).tiny)).item()


def _compare_tensors(trainer: Snapshot, engine: Snapshot) -> tuple[dict[str, int], tuple[str, ...]]:
    """Tensor → the engine's first differing part; and the names of tensors that it reported only
    partly or not at all.
    """
    differing, unknown = {}, []
    for name, held in trainer.tensors.items():
        parts = engine.tensors.get(name, ())
        if not _covers(parts, _whole_shape(held)):
            unknown.append(name)
        ours: Tensor | None = None
        for index, part in enumerate(parts):
            twin = next((each for each in held if _place_of(each) == _place_of(part)), None)
            if twin is not None:
                is_same = part.digest == twin.digest
            else:
                ours = trainer.values((name,))[name][0] if ours is None else ours
                is_same = part.digest == _digest_of(ours, part)
            if not is_same:
                differing[name] = index
                break
    return differing, tuple(unknown)


def _place_of(part: SnapshotPart) -> tuple[tuple[int, ...], int, int]:
    """Identifies the values of the tensor that a part has; the axis is irrelevant if it starts at 0."""
    return part.shape, part.start, part.axis if part.start else 0


def _whole_shape(parts: Sequence[SnapshotPart]) -> tuple[int, ...]:
    shape, axis = list(parts[0].shape), parts[0].axis
    if shape:
        shape[axis] = max(part.start + part.shape[axis] for part in parts)
    return tuple(shape)


def _covers(parts: Sequence[SnapshotPart], shape: tuple[int, ...]) -> bool:
    """Parts of a wrong shape count as reported: they differ."""
    if not parts or not shape:
        return bool(parts)
    end = 0
    for start, length in sorted((part.start, part.shape[part.axis]) for part in parts if part.shape):
        if start > end:
            return False
        end = max(end, start + length)
    return end >= shape[parts[0].axis]


def _range(whole: Tensor, part: SnapshotPart) -> Tensor | None:
    """The range of the trainer's tensor that corresponds to the part; None if the part does not fit."""
    if len(part.shape) != whole.dim() or part.start + part.shape[part.axis] > whole.shape[part.axis]:
        return None
    cut = whole.narrow(part.axis, part.start, part.shape[part.axis])
    return cut if cut.shape == part.shape else None


def _digest_of(whole: Tensor, part: SnapshotPart) -> str:
    cut = _range(whole, part)
    return "" if cut is None else tensor_digest(cut)


def _tensor_causes(
    names: Sequence[str], differing: Mapping[str, int], trainer: Snapshot, engine: Snapshot, group: int | None
) -> list[Cause]:
    listed = names[:LISTED]
    ours, theirs = (trainer.values(listed), engine.values(listed)) if listed else ({}, {})
    causes = []
    for name in names:
        detail = "another digest"
        if name in ours:
            part = engine.tensors[name][differing[name]]
            found = theirs[name][differing[name]]
            detail = _values_detail(ours[name][0], found, part, group)
            detail += f", on rank {part.rank}" if len(engine.tensors[name]) > 1 else ""
            detail += _holders(name, part, trainer, _range(ours[name][0], part), found)
        causes.append(Cause(_kind(name), name, detail))
    return causes


def _holders(name: str, part: SnapshotPart, trainer: Snapshot, ours: Tensor | None, theirs: Tensor) -> str:
    """The ranks of a divided trainer that hold the values which differ from the engine's part."""
    if not any(part.rank for parts in trainer.tensors.values() for part in parts) or _kind(name) == "adapter tensor":
        return ""
    unequal = None if ours is None else ours != theirs
    ranks = [each.rank for each in trainer.tensors[name] if unequal is None or _holds_some(each, part, unequal)]
    holders = ", ".join(map(str, ranks))
    return (
        f"; ranks {holders} of the trainer hold it" if len(ranks) > 1 else f"; rank {holders} of the trainer holds it"
    )


def _holds_some(each: SnapshotPart, part: SnapshotPart, unequal: Tensor) -> bool:
    """Args: unequal: mask over the values of `part`."""
    if not each.shape:
        return True
    offset = part.start if each.axis == part.axis else 0
    first, last = max(each.start - offset, 0), each.start - offset + each.shape[each.axis]
    at = torch.arange(unequal.shape[each.axis])
    return bool(unequal.index_select(each.axis, at[(at >= first) & (at < last)]).any())


def _copy_causes(trainer: Snapshot) -> list[Cause]:
    """Ranks of a divided trainer that hold the same part must hold the same values."""
    causes = []
    for name, parts in trainer.tensors.items():
        first: dict[tuple[tuple[int, ...], int, int], SnapshotPart] = {}
        for part in parts:
            other = first.setdefault(_place_of(part), part)
            if other.digest != part.digest:
                detail = f"ranks {other.rank} and {part.rank} of the trainer hold different values"
                causes.append(Cause(_kind(name), name, detail))
                break
    return causes


def _kind(name: str) -> str:
    return "adapter tensor" if name.rpartition(".")[2].startswith(("lora_", "oft_")) else "base tensor"


def _values_detail(whole: Tensor, b: Tensor, part: SnapshotPart, group: int | None) -> str:
    a = _range(whole, part)
    if a is None:
        return f"{tuple(whole.shape)} in the trainer, {tuple(b.shape)} in the engine"
    unequal = (a != b).nonzero()
    count = f"{len(unequal)} of {a.numel()} values differ"
    ratio = _common_ratio(a, b)
    if ratio is not None:
        return f"{count}; the engine's are {ratio:.4g} times the trainer's"
    if a.dim() == 2 and torch.equal(a.mT.contiguous().view(-1), b.reshape(-1)):
        return f"{count}; the engine's are the trainer's transposed"
    if not len(unequal):
        return "equal values of another sign or kind (zeros or NaN)"
    first = tuple(int(at) for at in unequal[0])
    values = f"{a[first].item():.6g} in the trainer, {b[first].item():.6g} in the engine"
    unequal[:, part.axis] += part.start
    where = f"first at {unequal[0].tolist()}: {values}"
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
            continue  # Named as missing.
        rows = min(len(ours), len(theirs)) if ours.dim() else None
        a, b = (ours[:rows], theirs[:rows]) if rows is not None else (ours, theirs)
        if a.shape == b.shape and bool(((a - b).abs() <= CONSTANT_TOLERANCE * a.abs().clamp(min=a.abs().max())).all()):
            continue
        detail = f"{a.item():.6g} in the trainer, {b.item():.6g} in the engine" if a.dim() == 0 else _angles(a, b)
        causes.append(Cause("constant", name, detail))
    return causes


def _router_causes(trainer: Snapshot, engine: Snapshot) -> list[Cause]:
    """A router's scores choose experts: if rounded to BF16, near ties are decided differently."""
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
    """Position in the forward pass where a tensor or constant is first used."""
    owner, _, kind = name.rpartition(".")
    if kind == ROTARY:
        owner = next((each for each in (f"{owner}.query", f"{owner}.attended") if each in order), owner)
    if owner not in order:
        parent, _, last = owner.rpartition(".")
        if ".experts." in f"{owner}.":
            parent = owner.partition(".experts")[0]
        owner = f"{parent}.{SHOWS_AT.get(last, '')}".removesuffix(".")
    return order.get(owner, len(order)), name
