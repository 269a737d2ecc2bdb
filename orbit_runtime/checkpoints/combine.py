"""Adapters as arithmetic, one or several: LoRA as a sum of products, OFT as a product of rotations.

    LoRA   W + sum_i w_i s_i B_i A_i
    OFT    base_n = base_(n-1)(x R_n), so x R_n … R_2 R_1 W^T: one rotation R = R_n … R_2 R_1, block by block

The first adapter named is next to the base. Rotations cannot be weighted: w_i is 1 for OFT. Everything stays as it is
in the adapters' files, which are mapped into memory, until a layer, or one of its experts, is requested.

Belongs here: the adapters' matrices and their combination. Does not belong here: the base's weights (`deltas`), files
of a combination (`combined_files`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from orbit_runtime.adapters import tensorfile
from orbit_runtime.adapters.files import layer_of
from orbit_runtime.adapters.oft import rotations
from orbit_runtime.checkpoints.adapter_folder import (
    EXPERT_LAYOUTS,
    MODEL_FILE,
    ROTATIONS_FILE,
    AdapterFolder,
    ExpertLayout,
    module_of,
)
from orbit_runtime.errors import ModelError, UnsupportedError, UsageError

EVERY = -1
"""Stands for an expert's number: tensors that all experts of a layer share, and those of dense layers."""

ByExpert = Mapping[int, Tensor]
"""Expert, or `EVERY` → a tensor as stored."""


@dataclass(frozen=True, slots=True, eq=False)
class LoRAPart:
    """`scaling * B A` of one layer, for each of its experts if it has any."""

    lora_A: ByExpert
    """`[r, K]` each."""
    lora_B: ByExpert
    """`[N, r]` each."""
    scaling: float

    @property
    def rank(self) -> int:
        return int(next(iter(self.lora_A.values())).shape[0])

    def experts(self) -> set[int]:
        """The experts with a matrix of their own."""
        return (self.lora_A.keys() | self.lora_B.keys()) - {EVERY}

    def covers(self, expert: int) -> bool:
        return pick(self.lora_A, expert) is not None and pick(self.lora_B, expert) is not None

    def delta(self, start: int, stop: int, expert: int = EVERY) -> Tensor | None:
        """fp32 rows `[start, stop)` of the product."""
        A, B = pick(self.lora_A, expert), pick(self.lora_B, expert)
        return None if A is None or B is None else (B[start:stop].float() @ A.float()).mul_(self.scaling)


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """One adapter's rotation of a layer."""

    held: ByExpert
    build: Callable[[Tensor], Tensor]
    """Stored tensor → fp64 R `[K/b, b, b]`."""


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """R of one layer, or of each of its experts."""

    factors: tuple[Factor, ...]
    """One per adapter, in their order."""
    size: int
    """Size of a block."""

    def experts(self) -> set[int]:
        """The experts with a rotation of their own."""
        return {expert for factor in self.factors for expert in factor.held} - {EVERY}

    def features(self) -> set[int]:
        """The numbers of inputs that are turned; more than one if the adapters do not fit each other."""
        return {self.size * len(held) for factor in self.factors for held in factor.held.values()}

    def at(self, expert: int = EVERY) -> Tensor | None:
        """fp32 R `[K/b, b, b]`; None if this expert is not adapted."""
        product: Tensor | None = None
        for factor in self.factors:
            held = pick(factor.held, expert)
            if held is not None:
                # The newer adapter is applied to the input first.
                product = factor.build(held) if product is None else torch.bmm(factor.build(held), product)
        return None if product is None else product.float()


@dataclass(frozen=True, slots=True)
class CombinedAdapter:
    """The arithmetic of one adapter, however it was made."""

    type: str
    lora: Mapping[str, tuple[LoRAPart, ...]]
    """Layer → terms of the sum."""
    rotation: Mapping[str, Rotation]
    """Layer → R."""
    experts: Mapping[str, int]
    """Layers of routed experts → the number of experts, if a tensor of all of them says so, otherwise 0."""
    layout: ExpertLayout
    """How routed experts share it: of the adapters' layouts, the one with the most parameters."""

    def layers(self) -> frozenset[str]:
        return frozenset(self.lora) | frozenset(self.rotation)

    def own_experts(self, layer: str) -> set[int]:
        """The experts of a layer that have something of their own."""
        parts = (self.rotation[layer],) if layer in self.rotation else self.lora[layer]
        return {expert for part in parts for expert in part.experts()}

    def changes(self, layer: str, expert: int) -> bool:
        """Whether this expert is adapted: PEFT can adapt some of them only."""
        if layer in self.rotation:
            return any(pick(factor.held, expert) is not None for factor in self.rotation[layer].factors)
        return any(part.covers(expert) for part in self.lora[layer])


def pick(held: ByExpert, expert: int) -> Tensor | None:
    return held.get(expert, held.get(EVERY))


def side_A(parts: Sequence[LoRAPart], expert: int) -> Tensor:
    """fp32 A of all parts `[sum of ranks, K]`. A part without this expert contributes zeros."""
    like = next(iter(parts[0].lora_A.values()))
    held = ((part, pick(part.lora_A, expert)) for part in parts)
    return torch.cat([torch.zeros(part.rank, like.shape[1]) if A is None else A.float() for part, A in held])


def side_B(parts: Sequence[LoRAPart], expert: int, unit: float = 1.0) -> Tensor:
    """fp32 B of all parts `[N, sum of ranks]`, each times its scaling in units of `unit`.

    If a scaling is a power of two units, nothing is rounded.
    """
    like = next(iter(parts[0].lora_B.values()))
    held = ((part, pick(part.lora_B, expert)) for part in parts)
    blocks = [torch.zeros(len(like), part.rank) if B is None else B.float() * (part.scaling / unit) for part, B in held]
    return torch.cat(blocks, dim=1)


def combine(adapters: Sequence[AdapterFolder], weights: Sequence[float]) -> CombinedAdapter:
    """The combined effect of the adapters.

    Raises:
        UsageError: the numbers of weights and adapters differ, or a rotation has a weight.
        UnsupportedError: LoRA with OFT, or rotations with different blocks.
        ModelError: a tensor is not finite, or the adapters are of different numbers of experts or of other shapes.
    """
    _check(adapters, weights)
    experts: dict[str, int] = {}
    lora: dict[str, list[LoRAPart]] = {}
    factors: dict[str, list[Factor]] = {}
    for adapter, weight in zip(adapters, weights, strict=True):
        for layer, count in _expert_layers(adapter).items():
            known = experts.setdefault(layer, count) or count
            if count not in (0, known):
                raise _misfit(layer, f"is for {count} experts, another for {known}", adapter.place)
            experts[layer] = known
        if adapter.type == "LoRA":
            for layer, part in _lora_parts(adapter, weight).items():
                lora.setdefault(layer, []).append(part)
        else:
            for layer, factor in _factors(adapter).items():
                factors.setdefault(layer, []).append(factor)
    layout = max((adapter.expert_layout for adapter in adapters), key=EXPERT_LAYOUTS.index)
    parts = {layer: tuple(terms) for layer, terms in lora.items()}
    turned = {layer: Rotation(tuple(each), adapters[0].rank) for layer, each in factors.items()}
    combined = CombinedAdapter(adapters[0].type, parts, turned, experts, layout)
    _check_shapes(combined, ", ".join(adapter.place for adapter in adapters))
    return combined


def _check(adapters: Sequence[AdapterFolder], weights: Sequence[float]) -> None:
    if len(weights) != len(adapters):
        raise UsageError(
            f"{len(weights)} weights for {len(adapters)} adapters", where="--weight", fix="give one for each, in order"
        )
    kinds = {adapter.type for adapter in adapters}
    if len(kinds) > 1:
        raise UnsupportedError(
            "LoRA and OFT cannot be combined into one adapter",
            where=", ".join(adapter.place for adapter in adapters),
            fix="merge one into the base first, then the other into the result",
        )
    if kinds == {"LoRA"}:
        return
    if any(weight != 1 for weight in weights):
        raise UsageError("a rotation has no weight", where="--weight", fix="leave --weight out for OFT")
    sizes = {adapter.rank for adapter in adapters}
    if len(sizes) > 1:
        raise UnsupportedError(f"rotations in blocks of {' and '.join(map(str, sorted(sizes)))} cannot be combined")


def _check_shapes(combined: CombinedAdapter, places: str) -> None:
    """Checks that what the adapters and experts of a layer change is one shape."""
    for layer, parts in combined.lora.items():
        of_A = {tuple(A.shape[1:]) for part in parts for A in part.lora_A.values()}
        of_B = {len(B) for part in parts for B in part.lora_B.values()}
        if len(of_A) > 1 or len(of_B) > 1:
            raise _misfit(layer, "has another shape than another one", places)
    for layer, rotation in combined.rotation.items():
        if len(rotation.features()) > 1:
            raise _misfit(layer, "turns another number of inputs than another one", places)


def _misfit(layer: str, what: str, where: str) -> ModelError:
    return ModelError(f"an adapter of {layer} {what}", where=where, fix="combine adapters of one base")


def _expert_layers(adapter: AdapterFolder) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, info in adapter.header.tensors.items():
        is_stacked = len(info.shape) == 3
        layer, expert = layer_of(module_of(name)[0], is_stacked=is_stacked)
        if is_stacked or expert is not None:
            count = info.shape[0] if is_stacked and info.shape[0] > 1 else 0
            found[layer] = max(count, found.get(layer, 0))
    return found


def _tensors(adapter: AdapterFolder, name: str) -> dict[str, Tensor]:
    where = f"{adapter.place}/{name}"
    try:
        tensors = tensorfile.parse(adapter.files[name], where=where)
    except KeyError as error:
        raise ModelError(f"tensors of dtype {error} do not belong in an adapter", where=where) from None
    for key, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise ModelError(f"the tensor {key} is not finite", where=where)
    return tensors


def _by_layer(tensors: Mapping[str, Tensor], dims: int) -> dict[tuple[str, str], dict[int, Tensor]]:
    """(layer, kind) → its tensors by expert, sharing the memory. Args: dims: of a tensor that is not stacked."""
    found: dict[tuple[str, str], dict[int, Tensor]] = {}
    for key, tensor in tensors.items():
        module, kind = module_of(key)
        is_stacked = tensor.ndim > dims
        layer, expert = layer_of(module, is_stacked=is_stacked)
        held = found.setdefault((layer, kind), {})
        if is_stacked and len(tensor) > 1:
            held |= enumerate(tensor.unbind(0))
        else:
            held[EVERY if expert is None else expert] = tensor[0] if is_stacked else tensor
    return found


def _lora_parts(adapter: AdapterFolder, weight: float) -> dict[str, LoRAPart]:
    held, scaling = _by_layer(_tensors(adapter, MODEL_FILE), 2), weight * adapter.scaling
    layers = dict.fromkeys(layer for layer, _ in held)
    return {layer: LoRAPart(held[layer, "lora_A"], held[layer, "lora_B"], scaling) for layer in layers}


def _factors(adapter: AdapterFolder) -> dict[str, Factor]:
    """Factors from the published BF16 rotations, with which the engine sampled, otherwise from
    PEFT's fp32 parameters.
    """
    if ROTATIONS_FILE in adapter.files:
        turned = _tensors(adapter, ROTATIONS_FILE)
        if {module_of(key)[0] for key in turned} != set(adapter.modules()):
            raise ModelError("it does not hold the adapter's modules", where=f"{adapter.place}/{ROTATIONS_FILE}")
        for key, R in turned.items():
            if R.ndim < 3 or tuple(R.shape[-2:]) != (adapter.rank, adapter.rank):
                where = f"{adapter.place}/{ROTATIONS_FILE}"
                raise ModelError(f"{key} does not hold blocks of {adapter.rank}", where=where)
        return {layer: Factor(held, Tensor.double) for (layer, _), held in _by_layer(turned, 3).items()}
    tensors = _tensors(adapter, MODEL_FILE)
    build = partial(_build, size=adapter.rank, form=adapter.parametrization, terms=adapter.neumann_terms)
    return {layer: Factor(held, build) for (layer, _), held in _by_layer(tensors, 2).items()}


def _build(parameters: Tensor, size: int, form: str, terms: int) -> Tensor:
    return rotations(parameters, size, form, terms).double()
