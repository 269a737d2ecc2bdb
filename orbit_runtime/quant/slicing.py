"""A rectangle of a packed weight, cut at group boundaries, for tensor and expert parallelism: no value is computed.

Belongs here: cutting, and the error if a cut would divide a group.
Does not belong here: which process holds which rectangle.
"""

from __future__ import annotations

from math import lcm

import torch

from orbit_runtime.errors import UnsupportedError
from orbit_runtime.quant.formats import FORMATS, Weight, format_of


def cut_multiples(weight: Weight) -> tuple[int, int]:
    """The numbers of rows and columns of which every cut must be a multiple."""
    covered = [tile for tile in FORMATS[format_of(weight)].tiles(weight).values() if tile is not None]
    return lcm(*(rows for rows, _ in covered)), lcm(*(columns for _, columns in covered if columns))


def slice_weight(weight: Weight, rows: slice, columns: slice = slice(None), *, owned: bool = False) -> Weight:
    """The rectangle as a weight of the same layout. Rows share memory; columns are copied if they are not all selected.

    Args:
        owned: copies everything, so that the rest can be freed.

    Raises `UnsupportedError` for a cut inside a group; the last group may be partial if the weight ends in it.
    """
    codec = FORMATS[format_of(weight)]
    starts_stops = []
    for axis, wanted, size, multiple in zip(
        ("rows", "columns"), (rows, columns), weight.shape, cut_multiples(weight), strict=True
    ):
        start, stop, step = wanted.indices(size)
        assert step == 1
        for cut in (start, stop):
            if cut % multiple and cut != size:
                raise UnsupportedError(
                    f"{axis} {start} to {stop} of {size} cut through a group of {multiple}",
                    fix=f"choose a parallel size that divides the {axis} at multiples of {multiple}",
                )
        starts_stops.append((start, stop))
    (first_row, last_row), (first_column, last_column) = starts_stops
    parts = {}
    tiles = codec.tiles(weight)
    for name, tensor in codec.buffers(weight).items():
        tile = tiles[name]
        part = tensor
        if tile is not None:
            tall, wide = tile
            part = tensor[first_row // tall : -(-last_row // tall)]
            if part.ndim > 1 and wide:
                part = part[:, first_column // wide : -(-last_column // wide)]
        parts[name] = part.clone(memory_format=torch.contiguous_format) if owned else part.contiguous()
    sliced: Weight = codec.from_buffers(parts)
    return sliced
