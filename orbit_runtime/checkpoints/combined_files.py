"""Several adapters as the files of one, in PEFT's format: LoRA by concatenation, OFT by multiplying rotations.

    LoRA   one adapter of rank sum_i r_i: [B_1' B_2' …] [A_1; A_2; …]
    OFT    R = R_n … R_2 R_1, and the Q of its Cayley form

Tensors are computed, written and hashed one after the other; the configuration and `manifest.json` come last.

Belongs here: names, shapes and values of the combination's tensors. Does not belong here: what is combined (`combine`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from orbit_runtime.adapters import tensorfile
from orbit_runtime.adapters.files import expert_file_names, is_outer
from orbit_runtime.adapters.oft import rotations
from orbit_runtime.checkpoints.adapter_folder import CONFIG_FILE, MODEL_FILE, PREFIX, ROTATIONS_FILE, AdapterFolder
from orbit_runtime.checkpoints.combine import EVERY, CombinedAdapter, LoRAPart, combine, side_A, side_B
from orbit_runtime.digests import PieceHasher, Pieces, cut, hash_pieces, tree_digest
from orbit_runtime.errors import OutputError, UnsupportedError
from orbit_runtime.storage import Manifest, Part
from orbit_runtime.storage.bundles import MANIFEST, manifest_json


@dataclass(frozen=True, slots=True)
class CombinedFiles:
    """The files that were written."""

    deviation: float
    """Largest |written - exact| divided by the largest |exact|, over all products B A or rotations."""
    modules: int
    rank: int
    """LoRA: the new rank; OFT: the block size."""


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """One module of the file."""

    name: str
    layer: str
    experts: tuple[int, ...]
    """Experts whose matrices it has; `EVERY` for a matrix that all of them share, or one of a dense layer."""
    is_stacked: bool
    """Whether its tensors have an axis of experts."""


def write_combined(
    adapters: Sequence[AdapterFolder], weights: Sequence[float], base: str | None, folder: Path
) -> CombinedFiles:
    """Writes the combination in PEFT's format, with `manifest.json`.

    Args:
        base: digest of the weights on which the adapters were trained, if they say so.

    Raises:
        UnsupportedError: a product of rotations has no Cayley form (it rotates something by 180 degrees); nothing stays
            in the folder.
        OutputError: the folder is not empty, or cannot be written.
    """
    combined = combine(adapters, weights)
    told = {**adapters[0].config, **dict.fromkeys(("exclude_modules", "layers_to_transform", "layers_pattern"))}
    config = {**told, "target_modules": sorted(_targets(adapters)), "inference_mode": True}
    with _new_folder(folder):
        if combined.type == "LoRA":
            pieces, rank, alpha, deviation = _write_concatenated(combined, folder)
            config |= {"r": rank, "lora_alpha": alpha, "use_rslora": False, "init_lora_weights": True}
        else:
            rank = adapters[0].rank
            pieces, deviation = _write_cayley(combined, rank, folder)
            config |= {"use_cayley_neumann": False, "coft": False}
        described = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
        pieces[CONFIG_FILE] = hash_pieces(cut(described))
        (folder / CONFIG_FILE).write_bytes(described)
        facts: dict[str, Any] = {
            "digest": tree_digest(pieces),
            "combined": [
                {"adapter": each.place, "digest": each.facts.get("digest"), "weight": weight}
                for each, weight in zip(adapters, weights, strict=True)
            ],
            "base": {"weights": base} if base else None,
        }
        parts = {name: Part(name, found) for name, found in pieces.items()}
        (folder / MANIFEST).write_bytes(manifest_json(Manifest("adapter", 0, parts, facts, 0.0)))
    return CombinedFiles(deviation, len(combined.layers()), rank)


@contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """An empty folder. After an error it is as it was."""
    existed = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise OutputError("the folder is not empty", where=str(folder), fix="name a new folder")
        try:
            yield
        except BaseException:
            for name in (MODEL_FILE, ROTATIONS_FILE, CONFIG_FILE, MANIFEST):
                (folder / name).unlink(missing_ok=True)
            if not existed:
                folder.rmdir()
            raise
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", where=str(folder)) from error


def _targets(adapters: Sequence[AdapterFolder]) -> set[str]:
    return {layer.rpartition(".")[2] for adapter in adapters for layer in adapter.layers()}


class _Writer:
    """One file of tensors whose shapes are known; they come in the order of their names, and are hashed on the way."""

    def __init__(self, path: Path, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> None:
        self._file = path.open("wb")
        self._hasher = PieceHasher()
        self._dtype = dtype
        self._left = iter(sorted(shapes))
        self._write(tensorfile.build_header({name: shapes[name] for name in sorted(shapes)}, dtype, tensorfile.FORMAT))

    def add(self, name: str, tensor: Tensor) -> None:
        assert name == next(self._left)
        values = tensor.to(self._dtype).contiguous().reshape(-1).view(torch.uint8)
        for piece in cut(values.numpy()):
            self._write(piece)

    def _write(self, piece: bytes | memoryview) -> None:
        self._file.write(piece)
        self._hasher.add(piece)

    def pieces(self) -> Pieces:
        """Once every tensor was added."""
        assert next(self._left, None) is None
        return self._hasher.result()

    def __enter__(self) -> _Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _entries(combined: CombinedAdapter, kind: str) -> list[ModuleEntry]:
    """The modules of the file with a tensor of this kind. Stacked ones have the shapes that their layout prescribes."""
    found: list[ModuleEntry] = []
    for layer in combined.layers():
        if layer not in combined.experts:
            found.append(ModuleEntry(layer, layer, (EVERY,), False))
            continue
        # Adapters that share everything in a layer do not record their number there, but all layers have as many.
        number = _named_experts(combined, layer) or max(_named_experts(combined, each) for each in combined.experts)
        every = tuple(range(number)) or (EVERY,)
        if combined.layout == "PerExpert":
            names = expert_file_names(layer, kind, combined.layout, number)
            modules = (name.removesuffix(f".{kind}") for name in names)
            found += [ModuleEntry(name, layer, (each,), False) for name, each in zip(modules, every, strict=True)
                      if combined.changes(layer, each)]  # fmt: skip
            continue
        (name,) = expert_file_names(layer, kind, combined.layout, number)
        is_shared = combined.layout == "Shared" or is_outer(layer, kind)
        found.append(ModuleEntry(name.removesuffix(f".{kind}"), layer, (EVERY,) if is_shared else every, True))
    return found


def _named_experts(combined: CombinedAdapter, layer: str) -> int:
    return max((expert + 1 for expert in combined.own_experts(layer)), default=combined.experts[layer])


def _shape(entry: ModuleEntry, matrix: Sequence[int]) -> tuple[int, ...]:
    return (len(entry.experts), *matrix) if entry.is_stacked else tuple(matrix)


def _together(entry: ModuleEntry, matrices: list[Tensor]) -> Tensor:
    return torch.stack(matrices) if entry.is_stacked else matrices[0]


def _write_concatenated(combined: CombinedAdapter, folder: Path) -> tuple[dict[str, Pieces], int, float, float]:
    """Pieces, rank, alpha and deviation. Layers with fewer terms are padded with zeros to one rank for all."""
    first = next(iter(combined.lora.values()))[0].scaling or 1.0
    rank = max(sum(part.rank for part in parts) for parts in combined.lora.values())
    entries = {
        f"{PREFIX}{entry.name}.{kind}.weight": (entry, kind)
        for kind in ("lora_A", "lora_B")
        for entry in _entries(combined, kind)
    }
    shapes = {}
    for name, (entry, kind) in entries.items():
        part = combined.lora[entry.layer][0]
        columns, rows = next(iter(part.lora_A.values())).shape[1], next(iter(part.lora_B.values())).shape[0]
        shapes[name] = _shape(entry, (rank, columns) if kind == "lora_A" else (rows, rank))
    with _Writer(folder / MODEL_FILE, shapes, torch.bfloat16) as writer:
        for name in sorted(entries):
            entry, kind = entries[name]
            parts = combined.lora[entry.layer]
            made = [side_A(parts, each) if kind == "lora_A" else side_B(parts, each, first) for each in entry.experts]
            missing = rank - sum(part.rank for part in parts)
            padding = (0, 0, 0, missing) if kind == "lora_A" else (0, missing)
            writer.add(name, F.pad(_together(entry, made), padding))
        return {MODEL_FILE: writer.pieces()}, rank, first * rank, _rounding(combined, first)


def _rounding(combined: CombinedAdapter, first: float) -> float:
    """The deviation, from what rounding changes: B' A' - B A = (B' - B) A' + B (A' - A)."""
    largest = wrong = 0.0
    if all(_is_exact(part, first) for parts in combined.lora.values() for part in parts):
        return 0.0
    for layer, parts in combined.lora.items():
        for expert in combined.own_experts(layer) or {EVERY}:
            A, B = side_A(parts, expert), side_B(parts, expert, first)
            written_A, written_B = A.bfloat16().float(), B.bfloat16().float()
            difference = (written_B - B) @ written_A + B @ (written_A - A)
            wrong = max(wrong, float(difference.abs().max()))
            largest = max(largest, float((B @ A).abs().max()))
    return wrong / largest if largest else 0.0


def _is_exact(part: LoRAPart, first: float) -> bool:
    """Whether BF16 holds its values, and those times a power of two."""
    held = (*part.lora_A.values(), *part.lora_B.values())
    return math.frexp(part.scaling / first)[0] in (0.5, -0.5) and all(each.dtype == torch.bfloat16 for each in held)


def _write_cayley(combined: CombinedAdapter, size: int, folder: Path) -> tuple[dict[str, Pieces], float]:
    """Pieces and deviation."""
    entries = sorted(_entries(combined, "oft_R"), key=lambda entry: f"{entry.name}.oft_R")
    shapes, turned = {}, {}
    for entry in entries:
        (features,) = combined.rotation[entry.layer].features()
        shapes[f"{PREFIX}{entry.name}.oft_R.weight"] = _shape(entry, (features // size, size * (size - 1) // 2))
        turned[f"{entry.name}.oft_R"] = _shape(entry, (features // size, size, size))
    deviation = 0.0
    with (
        _Writer(folder / MODEL_FILE, shapes, torch.float32) as model,
        _Writer(folder / ROTATIONS_FILE, turned, torch.bfloat16) as published,
    ):
        for entry in entries:
            solved = [_cayley(combined, entry.layer, expert, size) for expert in entry.experts]
            model.add(f"{PREFIX}{entry.name}.oft_R.weight", _together(entry, [kept for kept, _, _ in solved]))
            published.add(f"{entry.name}.oft_R", _together(entry, [again for _, again, _ in solved]))
            deviation = max(deviation, *(each for _, _, each in solved))
        return {MODEL_FILE: model.pieces(), ROTATIONS_FILE: published.pieces()}, deviation


def _cayley(combined: CombinedAdapter, layer: str, expert: int, size: int) -> tuple[Tensor, Tensor, float]:
    """Parameters, R and deviation: solves R = (I - Q)(I + Q)^-1 for Q.

    A rotation rounded to BF16 has a nearly skew Q: the skew part is taken, and the change that this causes is the
    deviation.
    """
    rows, columns = torch.triu_indices(size, size, 1)
    identity = torch.eye(size, dtype=torch.float64)
    R = combined.rotation[layer].at(expert)
    (features,) = combined.rotation[layer].features()
    wide = identity.expand(features // size, size, size) if R is None else R.double()
    sum_ = identity + wide
    if float(torch.linalg.cond(sum_).max()) > 1e6:
        raise UnsupportedError(
            "the product of the rotations turns a direction by nearly 180 degrees: it has no Cayley form",
            where=layer,
            fix="merge the adapters into the base, one after the other",
        )
    Q = torch.linalg.solve(sum_, identity - wide)
    skew = (Q - Q.mT) / 2
    kept = skew[:, rows, columns].float().contiguous()
    again = rotations(kept, size, "Cayley", 5)
    return kept, again, float((again.double() - wide).abs().max())
