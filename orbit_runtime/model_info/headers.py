"""Safetensors headers: a file's tensors with dtypes, shapes and offsets, and whether the file is complete.

Belongs here: reading headers of files and of folders with an index. Does not belong here: reading tensor values.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orbit_runtime.errors import ModelError
from orbit_runtime.model_info.settings import check_folder, load_settings, open_regular

BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "C64": 64, "F6_E2M3": 6,
    "F6_E3M2": 6, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000
"""The limit of the format itself."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Example: `TensorInfo("BF16", (128, 64), 0, 16384)`."""

    dtype: str
    """The name in the format: `BF16`, `I32`, `F32` …"""
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte, counted from the end of the header."""
    end: int
    stored_as: str = ""
    """Its name in the file, if that differs from `known_name`."""

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class TensorHeader:
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str] = field(default_factory=dict)
    data_start: int = 0
    """Offset of the tensor bytes in the file."""


def parse_header(data: bytes | memoryview, *, size: int, where: str) -> TensorHeader:
    """The header at the start of `data`, from a file of `size` bytes; raises `ModelError` naming `where` if
    incomplete."""
    if len(data) < 8 or size < 8:
        raise _broken(where, f"{size} bytes are too few for a safetensors file")
    length = int.from_bytes(data[:8], "little")
    data_start = 8 + length
    if length > MAX_HEADER_BYTES or data_start > size or len(data) < data_start:
        raise _broken(where, f"the header claims {length} bytes, the file has {size}")
    try:
        entries = json.loads(bytes(data[8:data_start]), object_pairs_hook=_without_duplicates)
        metadata = dict(entries.pop("__metadata__", {}))
        tensors = {name: _tensor_info(entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _broken(where, f"the header does not parse: {error}") from None
    _check_layout(tensors, size - data_start, where)
    return TensorHeader(tensors, metadata, data_start)


def read_header(path: Path) -> TensorHeader:
    """The header of one file, checked against the file's actual size. Reads only the header's bytes."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = min(int.from_bytes(start, "little"), size, MAX_HEADER_BYTES)
            data = start + file.read(length)
    except FileNotFoundError:
        raise ModelError("the file does not exist", where=str(path), fix="download the model again") from None
    except OSError as error:
        raise ModelError(f"the file cannot be read: {error.strerror}", where=str(path)) from None
    return parse_header(data, size=size, where=str(path))


def read_folder(folder: Path) -> dict[str, tuple[Path, TensorInfo]]:
    """Every tensor of a model folder → (file, info): `model.safetensors`, or the shards listed in the index."""
    check_folder(folder, "check the model's path")
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    is_whole = single.is_file() and index.is_file()
    listed = read_weight_map(load_settings(index), str(index)) if is_whole else {}
    if not index.is_file() or is_stale(listed, lambda name: (folder / name).is_file(), str(folder)):
        if not single.is_file():
            raise ModelError(
                "the folder holds neither model.safetensors nor model.safetensors.index.json",
                where=str(folder),
                fix="name a Hugging Face model folder with safetensors weights",
            )
        return with_known_names({name: (single, info) for name, info in read_header(single).tensors.items()})
    return with_known_names(_read_shards(folder, index))


def is_stale(weight_map: Mapping[str, str], is_there: Callable[[str], bool], where: str) -> bool:
    """Whether the index beside a whole file names other files, none of which is there.

    Raises:
        ModelError: they are there too, so that programs disagree about which model this is.
    """
    names = set(weight_map.values())
    if names and "model.safetensors" not in names and any(map(is_there, names)):
        raise ModelError(
            f"the folder holds model.safetensors and, by its index, {len(names)} other files: transformers reads the "
            "first, servers read the others",
            where=where,
            fix="delete those that do not belong to the model",
        )
    return bool(names) and "model.safetensors" not in names


def known_name(name: str) -> str:
    """The name that the model's publisher gives a tensor or a pattern of modules.

    NVIDIA's exports of Kimi-K2.5 and K2.6 leave out a part: `language_model.layers.0` for
    `language_model.model.layers.0`, in files and in `exclude_modules` alike (SGLang's `kimi_k25.py` maps it too).
    `torch.compile` adds one to each module that it wraps.
    """
    name = name.replace("_orig_mod.", "")
    shortened = "language_model.layers."
    return f"language_model.model.layers.{name[len(shortened) :]}" if name.startswith(shortened) else name


def with_known_names[F](tensors: Mapping[str, tuple[F, TensorInfo]]) -> dict[str, tuple[F, TensorInfo]]:
    """Tensor → (file, info) under the publisher's names; `stored_as` keeps that of the file."""
    return {
        (known := known_name(name)): (file, info if known == name else replace(info, stored_as=name))
        for name, (file, info) in tensors.items()
    }


def read_weight_map(index: Mapping[str, Any], where: str, fix: str = "download the model again") -> dict[str, str]:
    """Tensor → file, from a checkpoint's index.

    Raises:
        ModelError: it is not there, or names a file outside of the checkpoint's folder.
    """
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError("the index has no weight_map", where=where, fix=fix)
    for name in weight_map.values():
        if name.startswith("/") or ".." in name.split("/"):
            raise ModelError(f"the index names {name!r}, which is outside of the model's folder", where=where, fix=fix)
    return weight_map


def _read_shards(folder: Path, index: Path) -> dict[str, tuple[Path, TensorInfo]]:
    weight_map = read_weight_map(load_settings(index), str(index))
    files = sorted(set(weight_map.values()))
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise ModelError(
            f"{len(absent)} of {len(files)} shards are missing: {', '.join(absent[:3])}",
            where=str(folder),
            fix="download the model again",
        )
    found = {}
    for name in files:
        for tensor, info in read_header(folder / name).tensors.items():
            if weight_map.get(tensor) == name:
                found[tensor] = (folder / name, info)
    lost = sorted(set(weight_map) - set(found))
    if lost:
        raise ModelError(
            f"the index lists {lost[0]}, which {weight_map[lost[0]]} does not hold",
            where=str(index),
            fix="download the model again",
        )
    return found


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name occurs twice")
    return entries


def _tensor_info(entry: Mapping[str, Any]) -> TensorInfo:
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int and number >= 0 for number in (start, end, *shape)):
        raise ValueError("shapes and offsets must be whole numbers")
    if entry["dtype"] not in BITS:
        raise ValueError(f"there is no dtype {str(entry['dtype'])[:20]!r}")
    if math.prod(shape) * BITS[entry["dtype"]] != (end - start) * 8:
        raise ValueError(f"{entry['dtype']} {list(shape)} does not fill bytes {start} to {end}")
    return TensorInfo(str(entry["dtype"]), shape, start, end)


def _check_layout(tensors: Mapping[str, TensorInfo], data_bytes: int, where: str) -> None:
    """The format allows neither gaps nor overlaps."""
    position = 0
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != position:
            raise _broken(where, f"the bytes of {name} do not follow those of the tensor before it")
        position = info.end
    if position != data_bytes:
        raise _broken(where, f"its tensors need {position} bytes of data, the file has {data_bytes}")


def _broken(where: str, message: str) -> ModelError:
    return ModelError(message, where=where, fix="the file is truncated or damaged: copy or download it again")
