"""The parts of an adapter on the ranks of one server, and the whole tensors that they form.

SGLang divides an adapter along with its base: B of a column-parallel layer by rows, A of a row-parallel one by columns;
the other factor, and OFT's R, are whole on every rank. A rank that holds a copy of a lower rank's part sends its
digest.

Belongs here: pieces, joining them, naming the ranks that differ. Does not belong here: the part that a layer has
(`readback`), communication between ranks (`ranks`), SGLang.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from orbit_runtime.adapters.tensorfile import tensor_digest


@dataclass(frozen=True, eq=False)
class Piece:
    """One rank's part of one tensor."""

    name: str
    """`<module>.<kind>`, as in files without prefix and ending."""
    data: Tensor | str
    """Values in any dtype, or their digest."""
    axis: int | None = None
    """Axis along which the tensor is divided over ranks, in equal parts; None if it is whole here."""
    part: int = 0
    """Index of the part."""
    is_copy: bool = False
    """Whether a lower rank holds this part too."""

    @property
    def digest(self) -> str:
        return self.data if isinstance(self.data, str) else tensor_digest(self.data)


def pack(pieces: Iterable[Piece], *, whole: bool) -> list[Piece]:
    """Prepares pieces for sending: in host memory, in storage of their own.

    Args:
        whole: keeps the values of copies too, so that they can be compared.
    """
    return [replace(each, data=each.digest if each.is_copy and not whole else _own(each.data)) for each in pieces]


def join(ranks: Sequence[Sequence[Piece]]) -> dict[str, Tensor]:
    """Tensors by name. A part that two ranks hold differently, or one lacks, changes the name, which then matches
    nothing published.

    Args:
        ranks: the pieces of every rank, in order.
    """
    held: dict[str, dict[int, Tensor]] = {}
    for piece in (each for pieces in ranks for each in pieces):
        if not piece.is_copy and isinstance(piece.data, Tensor):
            held.setdefault(piece.name, {})[piece.part] = piece.data
    digests: dict[tuple[str, int], str] = {}
    wrong = {name: set(range(len(ranks))) for name in held}
    axes = {}
    for rank, pieces in enumerate(ranks):
        for piece in pieces:
            axes[piece.name] = piece.axis
            first, key = held.get(piece.name, {}).get(piece.part), (piece.name, piece.part)
            if first is None:
                continue
            if first is not piece.data and key not in digests:
                digests[key] = tensor_digest(first)
            if first is piece.data or digests[key] == piece.digest:
                wrong[piece.name].discard(rank)
    joined = {}
    for name, parts in held.items():
        mark = "".join(f".rank={rank}" for rank in sorted(wrong[name]))
        axis, ordered = axes[name], [parts[part] for part in sorted(parts)]
        joined[name + mark] = ordered[0] if axis is None or len(ordered) == 1 else torch.cat(ordered, axis)
    return joined


def with_pieces(
    published: Mapping[str, Tensor], ranks: Sequence[Sequence[Piece]], rank: int
) -> dict[str, Tensor] | None:
    """The published tensors with this rank's parts substituted; None if that changes nothing.

    A tensor that the rank lacks is left out; one that does not fit the published tensor is kept as it is.
    """
    counts: dict[str, int] = {}
    for piece in (each for pieces in ranks for each in pieces):
        counts[piece.name] = max(counts.get(piece.name, 1), piece.part + 1)
    found, changed = {}, len(ranks[rank]) != len(published)
    for piece in ranks[rank]:
        if piece.name not in published or isinstance(piece.data, str):
            changed = changed or piece.name not in published
            continue
        whole = published[piece.name].to(piece.data.dtype).clone()
        place = whole if piece.axis is None else whole.chunk(counts[piece.name], piece.axis)[piece.part]
        values = piece.data.cpu()
        if place.shape != values.shape:
            found[piece.name], changed = values, True
            continue
        changed = changed or not torch.equal(place, values)
        place.copy_(values)
        found[piece.name] = whole
    return found if changed else None


def _own(data: Tensor | str) -> Tensor | str:
    # A pickled view would include its whole buffer.
    return data if isinstance(data, str) else data.detach().cpu().clone(memory_format=torch.contiguous_format)
