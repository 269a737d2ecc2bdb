"""What the process that leads the ranks knows of their adapter: its tensors, their names in files, and who holds them.

Belongs here: assembling parts, one layer at a time, so that no process ever holds the whole adapter. Does not
belong here: the parts themselves (`rank`), file formats (`adapters`, `training.state`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from orbit_runtime.adapters import tensorfile
from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.inject import Injected
from orbit_runtime.adapters.masters import Place
from orbit_runtime.errors import InternalError

What = Literal["master", "exp_avg", "exp_avg_sq", "lora", "rotations", "applied"]
"""fp32 masters and moments; LoRA factors and OFT rotations as they are published, BF16; and what the newest `score`
multiplied by."""


@dataclass(frozen=True, slots=True)
class Held:
    """One parameter of a layer on one rank."""

    place: Place
    owner: str
    """The layer that owns the master."""
    file_names: tuple[str, ...]
    """Names of the whole parameter in files, without PEFT's prefix."""


Outline = Mapping[str, Held]
"""`<module>.<kind>` → what a rank holds of it; every layer that shares a parameter has an entry."""


def outline_of(injected: Injected) -> dict[str, Held]:
    owner = injected.masters.owner
    return {
        f"{name}.{kind}": Held(Place(kind, layer.part, shape), owner[name], layer.file_names(kind))
        for name, layer in injected.layers.items()
        for kind, shape in layer.shapes().items()
    }


def whole_shape(what: What, held: Held, config: AdapterConfig) -> tuple[int, ...]:
    shape = held.place.shape
    turned = what in ("rotations", "applied") and config.type == "OFT"
    return (*shape[:-1], config.block_size, config.block_size) if turned else shape


def cut_published(place: Place, whole: Tensor, config: AdapterConfig) -> Tensor:
    """The part of a published parameter that a rank must apply.

    Args:
        whole: the LoRA factor, or rotations `[…, K / b, b, b]`.
    """
    if place.kind != "oft_R":
        return place.cut(whole, config)
    # A block of a rotation is laid out as a row, like a block's parameters.
    return place.cut(whole.flatten(-2), config).unflatten(-1, whole.shape[-2:])


def assemble(
    what: What,
    keys: Sequence[str],
    outlines: Sequence[Outline],
    parts: Sequence[Mapping[str, Tensor]],
    config: AdapterConfig,
) -> dict[str, Tensor]:
    """Whole tensors, from the parts of all ranks.

    Raises:
        InternalError: the parts do not make up a whole tensor.
    """
    found = {}
    for key in keys:
        given = [(outline[key], part[key]) for outline, part in zip(outlines, parts, strict=True) if key in part]
        if not given:
            raise InternalError(f"no rank has {key}")
        held, first = given[0]
        shape = whole_shape(what, held, config)
        dtype = torch.float32 if any(part.dtype == torch.float32 for _, part in given) else first.dtype
        # A block of a rotation is laid out as a row, like a block's parameters.
        whole = torch.empty((*held.place.shape[:-1], math.prod(shape[len(held.place.shape) - 1 :])), dtype=dtype)
        for each, part in given:
            region = each.place.cut(whole, config)
            if region.numel() != part.numel():
                raise InternalError(f"a rank gave {tuple(part.shape)} of {key}, expected {tuple(region.shape)}")
            region.copy_(part.reshape(region.shape))
        if sum(part.numel() for _, part in given) != whole.numel():
            raise InternalError(f"the ranks' parts of {key} have other than its {whole.numel()} values")
        found[key] = whole.view(shape)
    return found


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file, and the source of its values."""

    name: str
    what: What
    key: str
    index: int | None
    """Index along the first dimension; None for the whole tensor."""
    shape: tuple[int, ...]


Fetch = Callable[[What, Sequence[str]], Mapping[str, Tensor]]


@dataclass(frozen=True)
class DividedFile:
    """Like `tensorfile.TensorFile`, for tensors that ranks hold in parts; fetches one layer at a time."""

    header: bytes
    entries: Sequence[Entry]
    """Sorted by name."""
    dtype: torch.dtype
    fetch: Fetch

    @property
    def size(self) -> int:
        return len(self.header) + sum(math.prod(entry.shape) for entry in self.entries) * self.dtype.itemsize

    def pieces(self) -> Iterator[memoryview]:
        yield memoryview(self.header)
        for tensors in fetched(self.entries, self.fetch):
            yield from tensorfile.runs(tensors.values(), lambda values: values.to(self.dtype), self.dtype.itemsize)


def build_divided(
    entries: Iterable[Entry], dtype: torch.dtype, fetch: Fetch, metadata: Mapping[str, str] = tensorfile.FORMAT
) -> DividedFile:
    ordered = sorted(entries, key=lambda entry: entry.name)
    header = tensorfile.build_header({entry.name: entry.shape for entry in ordered}, dtype, metadata)
    return DividedFile(header, ordered, dtype, fetch)


def fetched(entries: Sequence[Entry], fetch: Fetch) -> Iterator[dict[str, Tensor]]:
    """The tensors of a file by name, one layer at a time."""
    for (what, _), group in groupby(entries, key=lambda entry: (entry.what, layer_of(entry.key))):
        run = list(group)
        values = fetch(what, sorted({entry.key for entry in run}))
        yield {
            entry.name: values[entry.key] if entry.index is None else values[entry.key][entry.index] for entry in run
        }


def split_entries(what: What, key: str, source: str, held: Held, shape: tuple[int, ...]) -> list[Entry]:
    """The file entries of one parameter.

    Args:
        source: the parameter that has the values: the owner's, if layers share one.
    """
    if len(held.file_names) == 1:
        return [Entry(held.file_names[0], what, source, None, shape)]
    return [Entry(name, what, source, index, shape[1:]) for index, name in enumerate(held.file_names)]


def layer_of(key: str) -> str:
    """Example: `model.layers.3.mlp.up_proj.lora_A` → `model.layers.3`."""
    before, found, after = key.partition(".layers.")
    return f"{before}{found}{after.partition('.')[0]}"
