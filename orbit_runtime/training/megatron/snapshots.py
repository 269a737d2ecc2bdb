"""The snapshot of a divided trainer: what each rank records of one pass, assembled for `parity.locate`."""

from __future__ import annotations

from collections.abc import Buffer, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import batched

import numpy as np
import torch
from torch import Tensor

from orbit_runtime.adapters.state import published_tensors
from orbit_runtime.policy.model import Policy
from orbit_runtime.policy.shares import PER_HEAD, READ_HIDDEN, WRITE_HIDDEN, Share
from orbit_runtime.policy.snapshot import Snapshot, SnapshotPart, base_tensors, part_of
from orbit_runtime.training.megatron.groups import GroupSizes
from orbit_runtime.training.megatron.packed_tensors import PackedTensor, receive
from orbit_runtime.training.megatron.regions import in_order

OF_HEADS = {"query", "key", "attended"}
"""Points that are not a module's result; the parts of ranks are joined along the heads."""
OUTSIDE = {"embed_tokens", "input_layernorm", "post_attention_layernorm", "mlp", "norm"}
"""Modules whose result is a rank's run of the tokens under sequence parallelism."""


@dataclass(frozen=True)
class RankSnapshot:
    """One rank's snapshot, in divided form."""

    points: Mapping[str, PackedTensor]
    preferred_TLC: np.ndarray | None
    tensors: Mapping[str, SnapshotPart]
    """Tensors of the base."""
    constants: Mapping[str, PackedTensor]


Values = Callable[[Mapping[str, Sequence[int]]], Mapping[str, Sequence[Tensor]]]
"""(tensor → ranks that are to provide it) → (tensor → their parts, in that order)."""


def rank_tensors(policy: Policy, share: Share, rank: int) -> dict[str, SnapshotPart]:
    """Every tensor of the base of which this rank holds a part."""
    found = {}
    for name, read in base_tensors(policy.model):
        tensor = read()
        axis, start = _place(name, tuple(tensor.shape), share)
        found[name] = part_of(tensor, axis, start, rank)
    return found


def join_snapshots(
    parts: Sequence[RankSnapshot], sizes: GroupSizes, rows: int, files: Mapping[str, Buffer], values: Values
) -> Snapshot:
    """
    Args:
        parts: the snapshots of every rank; all ranks computed the same tokens.
        files: the published adapter that the pass applied; empty for the bare base.
    """
    stages = batched(parts, len(parts) // sizes.pipeline)
    # From each stage, the ranks that hold one replica of it.
    told = [stage[: sizes.tensor * sizes.context] for stage in stages]
    points: dict[str, Tensor] = {}
    for stage in told:
        points |= _join_stage([receive(each.points) for each in stage], sizes, rows)
    preferred = [found for stage in told if (found := _join_preferred(stage, sizes, rows)) is not None]
    known: dict[str, Tensor] = {}
    for stage in told:
        known |= receive(stage[0].constants)
    tensors: dict[str, tuple[SnapshotPart, ...]] = {}
    for each in parts:
        for name, part in each.tensors.items():
            tensors[name] = (*tensors.get(name, ()), part)
    adapter = published_tensors(files) if files else {}
    tensors |= {name: (part_of(tensor),) for name, tensor in adapter.items()}

    def read(names: Sequence[str]) -> Mapping[str, tuple[Tensor, ...]]:
        known = {name: (tensor.float(),) for name, tensor in adapter.items() if name in names}
        # A part that several ranks hold is read from the first of them.
        wanted = {name: _whole_of(tensors[name]) for name in names if name not in known}
        given = values({name: [part.rank for part in found] for name, found in wanted.items()}) if wanted else {}
        return known | {name: (torch.cat(list(given[name]), wanted[name][0].axis),) for name in wanted}

    preferred_TLC = np.concatenate(preferred, 1) if preferred else None
    return Snapshot(points, tensors, known, read, preferred_TLC=preferred_TLC)


def _join_stage(ranks: Sequence[Mapping[str, Tensor]], sizes: GroupSizes, rows: int) -> dict[str, Tensor]:
    """Args: ranks: grouped by token part; within a group, the ranks that divide the stage's matrices."""
    groups = list(batched(ranks, sizes.tensor))
    joined = [{name: _join(name, [each[name] for each in group], sizes) for name in group[0]} for group in groups]
    if sizes.context == 1:
        return {name: value[:rows] for name, value in joined[0].items()}
    return {name: in_order([each[name] for each in joined])[:rows] for name in joined[0]}


def _join_preferred(stage: Sequence[RankSnapshot], sizes: GroupSizes, rows: int) -> np.ndarray | None:
    parts = [each.preferred_TLC for each in stage[:: sizes.tensor]]
    known = [part for part in parts if part is not None]
    if not known or sizes.context == 1:
        return known[0] if known else None
    return in_order([torch.from_numpy(part) for part in known])[:rows].numpy()


def held_points(points: Mapping[str, Tensor], share: Share) -> dict[str, Tensor]:
    """The points that this rank computes: the first stage embeds tokens, the last stage has the final norm."""
    return {name: value for name, value in points.items() if share.holds(name)}


def _whole_of(parts: Sequence[SnapshotPart]) -> list[SnapshotPart]:
    by_start: dict[int, SnapshotPart] = {}
    for part in parts:
        by_start.setdefault(part.start, part)
    return [by_start[start] for start in sorted(by_start)]


def _place(name: str, shape: tuple[int, ...], share: Share) -> tuple[int, int]:
    """(axis, start) in the whole tensor."""
    rank, count = share.tensor
    owner, _, kind = name.rpartition(".")
    is_divided = (".self_attn." in name or ".mlp." in name) and ".experts." not in name
    if count == 1 or not is_divided:
        return 0, 0
    leaf = owner.rpartition(".")[2]
    if kind in PER_HEAD or leaf in READ_HIDDEN:
        return 0, rank * shape[0]
    return (1, rank * shape[1]) if leaf in WRITE_HIDDEN and kind == "weight" else (0, 0)


def _join(name: str, parts: Sequence[Tensor], sizes: GroupSizes) -> Tensor:
    last = name.rpartition(".")[2]
    inside = ".self_attn." in name or ".mlp." in name
    if len(parts) == 1:
        return parts[0]
    if last in OF_HEADS or (inside and last in READ_HIDDEN):
        return torch.cat(list(parts), -1)
    if inside and last in WRITE_HIDDEN:
        return torch.stack(list(parts)).sum(0)
    return torch.cat(list(parts)) if last in OUTSIDE and sizes.sequence_parallel else parts[0]
