"""Several adapters as one: LoRA by concatenation, OFT by multiplying rotations.

    LoRA   W + sum_i w_i s_i B_i A_i            one adapter of rank sum_i r_i: [B_1' B_2' …] [A_1; A_2; …]
    OFT    base_n = base_(n-1)(x R_n), so x R_n … R_2 R_1 W^T: one rotation R = R_n … R_2 R_1, block by block

The first adapter named is next to the base. Rotations cannot be weighted: w_i is 1 for OFT.

Belongs here: the adapters' matrices and their combination. Does not belong here: the base's weights (`deltas`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orbit_runtime.adapters import tensorfile
from orbit_runtime.adapters.files import pieces_of
from orbit_runtime.adapters.oft import rotations, skew_symmetric
from orbit_runtime.checkpoints.adapter_folder import (
    CONFIG_FILE,
    MODEL_FILE,
    PREFIX,
    ROTATIONS_FILE,
    AdapterFolder,
    module_of,
)
from orbit_runtime.digests import tree_digest
from orbit_runtime.errors import ModelError, UnsupportedError, UsageError
from orbit_runtime.storage import Manifest, Part
from orbit_runtime.storage.bundles import MANIFEST, manifest_json


@dataclass(frozen=True, slots=True, eq=False)
class LoRAPart:
    """`scaling * B A`, fp32."""

    lora_A: Tensor
    lora_B: Tensor
    scaling: float

    def delta(self, start: int, stop: int) -> Tensor:
        return (self.lora_B[start:stop] @ self.lora_A).mul_(self.scaling)


@dataclass(frozen=True, slots=True)
class Combined:
    """The arithmetic of one adapter, however it was made."""

    type: str
    lora: Mapping[str, tuple[LoRAPart, ...]]
    """Module → terms of the sum."""
    rotation: Mapping[str, Tensor]
    """Module → fp32 R `[K/b, b, b]`."""

    def modules(self) -> frozenset[str]:
        return frozenset(self.lora) | frozenset(self.rotation)


@dataclass(frozen=True, slots=True)
class CombinedFiles:
    files: Mapping[str, bytes]
    deviation: float
    """Largest |written - exact| divided by the largest |exact|, over all products B A or rotations."""
    modules: int
    rank: int
    """LoRA: the new rank; OFT: the block size."""


def combine(adapters: Sequence[AdapterFolder], weights: Sequence[float]) -> Combined:
    """The combined effect of the adapters.

    Raises:
        UsageError: the numbers of weights and adapters differ, or a rotation has a weight.
        UnsupportedError: LoRA with OFT, or rotations with different blocks.
    """
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
        lora: dict[str, list[LoRAPart]] = {}
        for adapter, weight in zip(adapters, weights, strict=True):
            for module, part in _lora_parts(adapter, weight).items():
                lora.setdefault(module, []).append(part)
        return Combined("LoRA", {module: tuple(parts) for module, parts in lora.items()}, {})
    if any(weight != 1 for weight in weights):
        raise UsageError("a rotation has no weight", where="--weight", fix="leave --weight out for OFT")
    sizes = {adapter.rank for adapter in adapters}
    if len(sizes) > 1:
        raise UnsupportedError(f"rotations in blocks of {' and '.join(map(str, sorted(sizes)))} cannot be combined")
    product: dict[str, Tensor] = {}
    for adapter in adapters:
        for module, rotation in _rotations(adapter).items():
            # The newer adapter is applied to the input first.
            product[module] = torch.bmm(rotation, product[module]) if module in product else rotation
    return Combined("OFT", {}, {module: R.float() for module, R in product.items()})


def write_combined(adapters: Sequence[AdapterFolder], weights: Sequence[float], base: str | None) -> CombinedFiles:
    """The combination in PEFT's format, with `manifest.json`.

    Raises:
        UnsupportedError: a product of rotations has no Cayley form (it rotates something by 180 degrees).
    """
    combined = combine(adapters, weights)
    config = {**adapters[0].config, "target_modules": sorted(_targets(adapters)), "inference_mode": True}
    if combined.type == "LoRA":
        tensors, rank, alpha, deviation = _concatenated(combined)
        config |= {"r": rank, "lora_alpha": alpha, "use_rslora": False, "init_lora_weights": True}
        files = {MODEL_FILE: tensorfile.dump(tensors, torch.bfloat16)}
    else:
        parameters, turned, deviation = _cayley(combined, adapters[0].rank)
        config |= {"use_cayley_neumann": False, "coft": False}
        rank = adapters[0].rank
        files = {
            MODEL_FILE: tensorfile.dump(parameters, torch.float32),
            ROTATIONS_FILE: tensorfile.dump(turned, torch.bfloat16),
        }
    files[CONFIG_FILE] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    pieces = pieces_of(files)
    facts: dict[str, Any] = {
        "digest": tree_digest(pieces),
        "combined": [
            {"adapter": each.place, "digest": each.facts.get("digest"), "weight": weight}
            for each, weight in zip(adapters, weights, strict=True)
        ],
        "base": {"weights": base} if base else None,
    }
    parts = {name: Part(name, pieces[name]) for name in files}
    files[MANIFEST] = manifest_json(Manifest("adapter", 0, parts, facts, 0.0))
    return CombinedFiles(files, deviation, len(combined.modules()), rank)


def _targets(adapters: Sequence[AdapterFolder]) -> set[str]:
    return {module.rpartition(".")[2] for adapter in adapters for module in adapter.modules()}


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


def _lora_parts(adapter: AdapterFolder, weight: float) -> dict[str, LoRAPart]:
    tensors = {module_of(key): tensor.float() for key, tensor in _tensors(adapter, MODEL_FILE).items()}
    scaling = weight * adapter.scaling
    return {
        module: LoRAPart(tensors[module, "lora_A"], tensors[module, "lora_B"], scaling) for module in adapter.modules()
    }


def _rotations(adapter: AdapterFolder) -> dict[str, Tensor]:
    """fp64 R of every module: from the published BF16 values, with which the engine sampled, else from PEFT's fp32."""
    if ROTATIONS_FILE in adapter.files:
        turned = {key.removesuffix(".oft_R"): R.double() for key, R in _tensors(adapter, ROTATIONS_FILE).items()}
        if turned.keys() != set(adapter.modules()):
            raise ModelError("it does not hold the adapter's modules", where=f"{adapter.place}/{ROTATIONS_FILE}")
        return turned
    config, size = adapter.config, adapter.rank
    form = "CayleyNeumann" if config.get("use_cayley_neumann") else "Cayley"
    terms = int(config.get("num_cayley_neumann_terms", 5))
    if config.get("coft"):
        raise UnsupportedError("constrained OFT (coft) without its rotations is not merged", where=adapter.place)
    built = {}
    for key, parameters in _tensors(adapter, MODEL_FILE).items():
        if parameters.shape[1] != size * (size - 1) // 2:
            raise ModelError(f"{key} does not hold blocks of {size}", where=f"{adapter.place}/{MODEL_FILE}")
        built[module_of(key)[0]] = rotations(parameters, size, form, terms).double()
    return built


def _concatenated(combined: Combined) -> tuple[dict[str, Tensor], int, float, float]:
    """Tensors, rank, alpha and deviation. Modules with fewer terms are padded with zeros to one rank for all."""
    first = next(iter(combined.lora.values()))[0].scaling or 1.0
    rank = max(sum(part.lora_A.shape[0] for part in parts) for parts in combined.lora.values())
    tensors: dict[str, Tensor] = {}
    largest = wrong = 0.0
    for module, parts in combined.lora.items():
        A = torch.cat([part.lora_A for part in parts])
        # If scalings differ by a power of two, nothing is rounded.
        B = torch.cat([part.lora_B * (part.scaling / first) for part in parts], dim=1)
        missing = rank - A.shape[0]
        A, B = torch.nn.functional.pad(A, (0, 0, 0, missing)), torch.nn.functional.pad(B, (0, missing))
        tensors |= {f"{PREFIX}{module}.lora_A.weight": A, f"{PREFIX}{module}.lora_B.weight": B}
        exact = sum((part.delta(0, len(B)).double() for part in parts), torch.zeros(()))
        written = (B.bfloat16().double() @ A.bfloat16().double()) * first
        largest = max(largest, float(exact.abs().max()))
        wrong = max(wrong, float((written - exact).abs().max()))
    return tensors, rank, first * rank, wrong / largest if largest else 0.0


def _cayley(combined: Combined, size: int) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """Solves R = (I - Q)(I + Q)^-1 for Q. A rotation rounded to BF16 has a nearly skew Q: the skew part is taken, and
    the change that this causes is the deviation."""
    rows, columns = torch.triu_indices(size, size, 1)
    identity = torch.eye(size, dtype=torch.float64)
    parameters, turned, deviation = {}, {}, 0.0
    for module, R in combined.rotation.items():
        wide = R.double()
        sum_ = identity + wide
        if float(torch.linalg.cond(sum_).max()) > 1e6:
            raise UnsupportedError(
                "the product of the rotations turns a direction by nearly 180 degrees: it has no Cayley form",
                where=module,
                fix="merge the adapters into the base, one after the other",
            )
        Q = torch.linalg.solve(sum_, identity - wide)
        skew = (Q - Q.mT) / 2
        kept = skew[:, rows, columns].float().contiguous()
        again = rotations(kept, size, "Cayley", 5)
        assert torch.equal(skew_symmetric(kept, size), -skew_symmetric(kept, size).mT)
        deviation = max(deviation, float((again.double() - wide).abs().max()))
        parameters[f"{PREFIX}{module}.oft_R.weight"] = kept
        turned[f"{module}.oft_R"] = again
    return parameters, turned, deviation
