"""The trainer's side of an adapter: fp32 master parameters, and the published rounding that a pass multiplies by.

Belongs here: masters, ties between projections that share an input, rounding with a straight-through gradient, values
that the masters hold temporarily during a measurement.
Does not belong here: optimisers, files.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.layer import Slot
from orbit_runtime.adapters.lora import LoRASlot
from orbit_runtime.adapters.oft import OFTSlot, constrained, series_error
from orbit_runtime.adapters.pages import Pages, room
from orbit_runtime.adapters.part import WHOLE, WeightPart
from orbit_runtime.adapters.rotations import RotationCache, Rotations
from orbit_runtime.seeds import stream_key
from orbit_runtime.types import Probe

PROBE_SIZE = 0.1
"""Approximate share by which a random adapter changes a layer's output: far above rounding, far below noise."""


class _Rounded(torch.autograd.Function):
    """Rounds to BF16 and widens again; the gradient passes straight through. Many tensors in one node of the graph."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, kept: Pages | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        sizes, device = [tensor.numel() for tensor in tensors], tensors[0].device
        if device.type == "cpu":
            values = kept.room(sum(sizes), dtype) if kept else room(sum(sizes), dtype)
        else:
            values = torch.empty(sum(sizes), dtype=dtype, device=device)
        parts = values.split_with_sizes(sizes)
        for part, tensor in zip(parts, tensors, strict=True):
            # Rounded where it is to lie: at no time are all of them there once more, be it in fp32 or in BF16.
            part.copy_(tensor.reshape(-1) if dtype == torch.bfloat16 else tensor.reshape(-1).to(torch.bfloat16))
        return tuple(part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(grad.float() for grad in grads))


@dataclass(frozen=True, slots=True)
class MasterPlace:
    """The position of a parameter in the whole adapter's parameter."""

    kind: str
    """`lora_A`, `lora_B` or `oft_R`; anything else is not divided."""
    part: WeightPart
    shape: tuple[int, ...]
    """Shape of the whole parameter."""

    def cut(self, whole: Tensor, config: AdapterConfig) -> Tensor:
        """The part of `whole` that this process holds."""
        return self.part.cut(self.kind, whole, config.block_size)

    @property
    def is_whole(self) -> bool:
        """Whether every process of the part's group holds all of it."""
        return self.part.is_whole(self.kind, self.shape[0] if self.part.num_experts else None)


class Trainable(Protocol):
    """What an optimiser updates: the masters of an adapter, or of a whole model (`policy.whole`)."""

    @property
    def config(self) -> AdapterConfig: ...

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """fp32, sorted by name."""

    def after_update(self) -> None:
        """Call after an optimiser update."""

    def series_error(self) -> float:
        """See `Masters`; 0 if there is no series."""


@dataclass(frozen=True, eq=False)
class Masters:
    """The masters of every layer, and how layers share them.

    Layers that share an input share one OFT parameter: `owner[layer]` names the layer that holds it.
    """

    config: AdapterConfig
    parameters: Mapping[str, nn.Parameter]
    """`<module>.lora_A`, `<module>.lora_B` or, for owners only, `<module>.oft_R`; fp32, sorted by name."""
    owner: Mapping[str, str]
    places: Mapping[str, MasterPlace]
    """The place of each parameter."""

    def applied(
        self,
        compute_dtype: torch.dtype,
        layer: str | None = None,
        experts: slice = WHOLE,
        newest: RotationCache | None = None,
    ) -> dict[str, Slot]:
        """Every layer's slot as it would be after a publish, with gradient to the masters.

        Args:
            layer: only this one's.
            experts: of the experts that this process holds, only these; what experts share is whole in any case.
            newest: what the call before built, and its pages; of rotations, this one may need the same.
        """
        if self.config.type == "LoRA":
            names: Collection[str] = self.owner if layer is None else (layer,)
            keys: Collection[str] = self.parameters if layer is None else (f"{layer}.lora_A", f"{layer}.lora_B")
            values = [self._of_experts(key, experts) for key in keys]
            kept = newest.pages if newest else None
            rounded = dict(zip(keys, _Rounded.apply(compute_dtype, kept, *values), strict=True))
            return {
                name: LoRASlot(rounded[f"{name}.lora_A"], rounded[f"{name}.lora_B"], self.config.scaling)
                for name in names
            }
        is_rounded = self.config.rotation_dtype == "BF16"
        if layer is not None:
            owner, newest = self.owner[layer], newest or RotationCache()
            if newest.applied is None or newest.applied[:2] != (owner, experts):
                newest.applied = None
                R = self.rotations.of(owner, experts, newest)
                newest.applied = (
                    owner,
                    experts,
                    _Rounded.apply(compute_dtype, newest.pages, R)[0] if is_rounded else R,
                )
            return {layer: OFTSlot(newest.applied[2])}
        every = self.rotations.every()
        if is_rounded:
            every = dict(zip(every, _Rounded.apply(compute_dtype, None, *every.values()), strict=True))
        return {name: OFTSlot(every[owner]) for name, owner in self.owner.items()}

    @cached_property
    def rotations(self) -> Rotations:
        """OFT's rotations by which passes multiply, before they are rounded."""
        keys = {key.removesuffix(".oft_R"): key for key in self.parameters}
        stacked = {owner for owner, key in keys.items() if self._is_stacked(key)}
        return Rotations(self.config, {owner: self.parameters[key] for owner, key in keys.items()}, stacked)

    def _of_experts(self, key: str, experts: slice) -> Tensor:
        return self.parameters[key][experts] if self._is_stacked(key) else self.parameters[key]

    def _is_stacked(self, key: str) -> bool:
        """Whether each expert has its own."""
        place = self.places[key]
        return place.part.num_experts > 0 and not place.is_whole

    def series_error(self) -> float:
        """Largest distance of a block of OFT's truncated series from an exact rotation; see `oft.series_error`."""
        config = self.config
        if config.type != "OFT":
            return 0.0
        values = self.parameters.values()
        return series_error(values, config.block_size, config.parametrization, config.neumann_terms)

    def after_update(self) -> None:
        """Applies COFT's bound on Q after an optimiser update. PEFT does the same before every pass."""
        if self.config.coft:
            with torch.no_grad():
                for parameter in self.parameters.values():
                    parameter.copy_(constrained(parameter, self.config.coft_eps))

    @contextmanager
    def probing(self, probe: Probe, seed: int) -> Iterator[None]:
        """Within this context the masters hold an untrained adapter; afterwards their own values, bit for bit.

        `identity` does not change the base's output, `random` changes every layer. Do not enter it while a graph over
        the masters is alive.
        """
        kept = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        try:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(self._probe_values(name, probe, seed))
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(kept[name])

    def _probe_values(self, name: str, probe: Probe, seed: int) -> Tensor:
        place = self.places[name]
        return place.cut(self._whole_probe(name, place.shape, probe, seed), self.config)

    def _whole_probe(self, name: str, shape: tuple[int, ...], probe: Probe, seed: int) -> Tensor:
        """The same in every process, however the parameter is divided."""
        if probe == "identity" and not name.endswith("lora_A"):
            return torch.zeros(shape)
        generator = torch.Generator().manual_seed(stream_key(seed, f"probe-{probe}", name))
        values = torch.randn(shape, generator=generator)
        if self.config.type == "OFT":
            # A row of Q has b - 1 entries, and R is about I + 2Q.
            return values * (PROBE_SIZE / (2 * math.sqrt(self.config.block_size)))
        if name.endswith("lora_A"):
            return values / math.sqrt(shape[-1])
        return values * (PROBE_SIZE / (self.config.scaling * math.sqrt(self.config.rank)))
