"""Applies an adapter to the base's weights, a run of rows at a time.

    LoRA   y = x W^T + s (x A^T) B^T      =>   W' = W + s B A
    OFT    y = (x R) W^T                  =>   W' = W R^T, block by block

Each routed expert has a weight of its own, so a change that experts share is applied to each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, takewhile

from torch import Tensor

from orbit_runtime.adapters.oft import rotate
from orbit_runtime.checkpoints.combine import EVERY, CombinedAdapter
from orbit_runtime.errors import ModelError

Rename = Callable[[str], str]
"""The model's own name of a module → the checkpoint's."""


@dataclass(frozen=True, slots=True)
class WeightSpot:
    """A weight of the base that an adapter changes. Example: `WeightSpot("model.layers.1.mlp.experts.up_proj", 3)`."""

    layer: str
    expert: int = EVERY


@dataclass(slots=True)
class AdapterChange:
    """A `Change` for `rewrite`."""

    combined: CombinedAdapter
    spots: Mapping[str, WeightSpot]
    """The base's module → what changes it."""
    _modules: frozenset[str] = field(init=False)
    _newest: tuple[WeightSpot, Tensor] | None = field(init=False, default=None)
    """The rotation of the rows before."""

    def __post_init__(self) -> None:
        self._modules = frozenset(self.spots)

    def modules(self) -> frozenset[str]:
        return self._modules

    def apply(self, module: str, rows: Tensor, start: int) -> Tensor:
        """fp32 rows of W → fp32 rows of W'."""
        spot = self.spots[module]
        if spot.layer in self.combined.rotation:
            # A row w of W becomes w R^T: the same product as for an input, with R transposed.
            return rotate(rows, self._rotation(spot).mT.contiguous())
        for part in self.combined.lora[spot.layer]:
            delta = part.delta(start, start + len(rows), spot.expert)
            rows = rows if delta is None else rows + delta
        return rows

    def _rotation(self, spot: WeightSpot) -> Tensor:
        rotation = self.combined.rotation[spot.layer]
        is_own = any(spot.expert in factor.held for factor in rotation.factors)
        key = spot if is_own else WeightSpot(spot.layer)
        if self._newest is None or self._newest[0] != key:
            R = rotation.at(spot.expert)
            assert R is not None, "a spot is changed by some adapter"
            self._newest = (key, R)
        return self._newest[1]


def find_spots(
    combined: CombinedAdapter, shapes: Mapping[str, tuple[int, int]], rename: Rename, base: str
) -> dict[str, WeightSpot]:
    """The base's weights that the adapter changes, by module.

    Args:
        shapes: the base's weights. An expert in a tensor of all experts is called `<tensor>.<expert>`.

    Raises:
        ModelError: naming the first adapted layer that the base lacks, or has in another shape or number of experts.
    """
    spots: dict[str, WeightSpot] = {}
    for layer in sorted(combined.layers()):
        found = list(_modules(layer, combined, shapes, rename))
        if not found:
            raise _other_base(f"the adapter changes {layer}, which is not a linear layer of the base", base)
        own = combined.own_experts(layer)
        if max(own, default=0) >= len(found) or combined.experts.get(layer, 0) not in (0, len(found)):
            number = combined.experts[layer] or max(own) + 1
            raise _other_base(f"the adapter of {layer} is for {number} experts, the base has {len(found)}", base)
        for module, expert in found:
            if combined.changes(layer, expert):
                wrong = _misfit(combined, layer, shapes[module])
                if wrong:
                    rows, columns = shapes[module]
                    raise _other_base(f"the adapter of {layer} {wrong}, the base's weight is [{rows}, {columns}]", base)
                spots[module] = WeightSpot(layer, expert)
    return spots


def _modules(
    layer: str, combined: CombinedAdapter, shapes: Mapping[str, tuple[int, int]], rename: Rename
) -> Iterator[tuple[str, int]]:
    """(the base's module, expert): one for a dense layer, one for each expert of a layer of experts."""
    if layer not in combined.experts:
        yield from ((name, EVERY) for name in (_known(layer, shapes, rename),) if name)
        return
    parent, _, leaf = layer.rpartition(".")
    for form in (f"{parent}.{{}}.{leaf}", f"{layer}.{{}}"):
        names = ((_known(form.format(expert), shapes, rename), expert) for expert in count())
        yield from takewhile(lambda found: found[0] is not None, names)


def _known(name: str, shapes: Mapping[str, tuple[int, int]], rename: Rename) -> str | None:
    """The name itself counts first: an adapter of PEFT's own may have the checkpoint's names."""
    return next((each for each in (name, rename(name)) if each in shapes), None)


def _misfit(combined: CombinedAdapter, layer: str, shape: tuple[int, int]) -> str:
    """Describes how the adapter's shape differs from the base's; empty if it fits."""
    rows, columns = shape
    if layer in combined.rotation:
        (features,) = combined.rotation[layer].features()
        return f"rotates {features} inputs" if features != columns else ""
    for part in combined.lora[layer]:
        A, B = next(iter(part.lora_A.values())), next(iter(part.lora_B.values()))
        if (B.shape[0], A.shape[1]) != shape:
            return f"is [{B.shape[0]}, {A.shape[1]}]"
        if part.rank > min(rows, columns):
            return f"has rank {part.rank}"
    return ""


def _other_base(message: str, base: str) -> ModelError:
    return ModelError(message, where=base, fix="name the base that the adapter was trained on")
