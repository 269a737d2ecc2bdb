"""What the layers of a pass multiply by, hashed while the pass goes on; the values themselves are not kept.

Belongs here: hashes by parameter, from a trace. Does not belong here: names in files, the digest (`files`, `state`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from orbit_runtime.adapters import tensorfile
from orbit_runtime.adapters.inject import AdaptedLayer
from orbit_runtime.adapters.layer import Applied
from orbit_runtime.digests import Pieces
from orbit_runtime.errors import InternalError

AppliedPieces = Mapping[str, tuple[Pieces, ...]]
"""`<module>.<kind>` → pieces of each tensor that this process holds of it: one for each expert if each has its own in
files."""

_Key = tuple[str, int, int]
"""Parameter, index of its tensor, and how often that was applied before."""


_IN_FLIGHT_BYTES = 1 << 23
"""Enough to keep eight threads busy; nothing of a pass may pile up while they have no processor."""


class AppliedHashes:
    """For one pass without gradient; `add` is a trace."""

    def __init__(self, layers: Mapping[str, AdaptedLayer]) -> None:
        self._layers = layers
        self._hasher = tensorfile.TensorHasher[_Key](_IN_FLIGHT_BYTES)
        self._times: dict[tuple[str, int], int] = {}
        self.scalings: dict[str, set[float | None]] = {}
        """By module."""

    def add(self, entry: Applied) -> None:
        self.scalings.setdefault(entry.module, set()).add(entry.scaling)
        self._hasher.add(self._keyed(entry))

    def _keyed(self, entry: Applied) -> Iterator[tuple[_Key, Tensor]]:
        layer = self._layers[entry.module]
        for kind in layer.shapes():
            names, indices = layer.held_names(kind), range(len(layer.held_names(kind)))
            indices = indices[entry.experts] if len(names) > 1 else indices
            for index in indices:
                place = (f"{entry.module}.{kind}", index)
                times = self._times[place] = self._times.get(place, -1) + 1
                yield (*place, times), entry.tensors[names[index]].detach()

    def result(self) -> AppliedPieces:
        """Of the parameters that were applied with all their tensors.

        Raises:
            InternalError: one pass applied two different values of a parameter.
        """
        found = self._hasher.result()
        for (key, index, times), pieces in found.items():
            if times and pieces != found[key, index, 0]:
                raise InternalError(f"one pass applied two different values of {key}")
        result: dict[str, tuple[Pieces, ...]] = {}
        for module in self.scalings:
            layer = self._layers[module]
            for kind in layer.shapes():
                places = [(f"{module}.{kind}", index, 0) for index in range(len(layer.held_names(kind)))]
                if all(place in found for place in places):
                    result[f"{module}.{kind}"] = tuple(found[place] for place in places)
        return result
