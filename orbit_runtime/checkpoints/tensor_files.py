"""Runs of rows of tensors in safetensors files: read without the rest of the tensor, written in place.

Belongs here: bytes ↔ rows of tensors. Does not belong here: formats (`quant`), what is written (`rewrite`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from orbit_runtime.errors import ModelError
from orbit_runtime.model_info.headers import TensorInfo, read_folder, read_header

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}
COPY_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor of an output file. Example: `Output("lm_head.weight", "BF16", (128, 64))`."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class TensorSource:
    """The tensors of a model folder. Opens one file at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, tuple[Path, TensorInfo]] = read_folder(folder)
        self._data_start: dict[Path, int] = {}

    def infos(self) -> dict[str, TensorInfo]:
        return {name: info for name, (_, info) in self.tensors.items()}

    def where(self, name: str) -> str:
        return f"{self.tensors[name][0]}: {name}"

    def in_order(self) -> list[str]:
        """Names in the order of their bytes in the file."""
        return sorted(self.tensors, key=lambda name: (str(self.tensors[name][0]), self.tensors[name][1].start))

    def read(self, name: str) -> Tensor:
        info = self.tensors[name][1]
        return self._bytes(name, 0, info.num_bytes).view(DTYPES[info.dtype]).view(info.shape)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `[start, stop)` of a matrix."""
        info = self.tensors[name][1]
        width = info.shape[1] * DTYPES[info.dtype].itemsize
        rows = self._bytes(name, start * width, (stop - start) * width)
        return rows.view(DTYPES[info.dtype]).view(stop - start, info.shape[1])

    def read_part(self, name: str, index: int) -> Tensor:
        """`tensor[index]` along the first axis."""
        info = self.tensors[name][1]
        size = info.num_bytes // info.shape[0]
        return self._bytes(name, index * size, size).view(DTYPES[info.dtype]).view(info.shape[1:])

    def blocks(self, name: str) -> list[tuple[int, int]]:
        """Yields (offset, bytes) for each piece in which a tensor is copied."""
        size = self.tensors[name][1].num_bytes
        return [(offset, min(COPY_BYTES, size - offset)) for offset in range(0, size, COPY_BYTES)]

    def raw(self, name: str, offset: int, count: int) -> bytearray:
        path, info = self.tensors[name]
        if path not in self._data_start:
            self._data_start[path] = read_header(path).data_start
        data = bytearray(count)
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(self._data_start[path] + info.start + offset)
                view, got = memoryview(data), 0
                while got < count:
                    part = file.readinto(view[got:])
                    if not part:
                        raise ModelError("the file ends early", where=self.where(name), fix="copy or download it again")
                    got += part
        except OSError as error:
            raise ModelError(f"the file cannot be read: {error.strerror}", where=str(path)) from error
        return data

    def _bytes(self, name: str, offset: int, count: int) -> Tensor:
        return torch.frombuffer(self.raw(name, offset, count), dtype=torch.uint8) if count else torch.empty(0)


class ShardWriter:
    """Writes one safetensors file whose tensors are known in advance: the header first, then rows, in any order.

    The file gets its name only once complete; until then it is called `….part`.
    """

    def __init__(self, path: Path, outputs: Sequence[Output]) -> None:
        self.path = path
        self._part = path.with_name(f"{path.name}.part")
        self._place: dict[str, tuple[int, Output]] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for output in outputs:
            end = position + output.num_bytes
            header[output.name] = {
                "dtype": output.dtype, "shape": list(output.shape), "data_offsets": [position, end],
            }  # fmt: skip
            self._place[output.name] = (position, output)
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._start, self._size = 8 + len(text), position
        self._file = self._part.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._place[name][1].shape

    def write_bytes(self, name: str, offset: int, data: bytes | bytearray | memoryview) -> None:
        self._file.seek(self._start + self._place[name][0] + offset)
        self._file.write(data)

    def write_rows(self, name: str, start: int, rows: Tensor) -> None:
        """Writes rows from `start` on; a scalar or a whole tensor is written at 0."""
        output = self._place[name][1]
        assert CODES[rows.dtype] == output.dtype, (name, rows.dtype)
        width = math.prod(output.shape[1:]) * rows.itemsize
        flat = rows.contiguous().reshape(-1)
        self.write_bytes(name, start * width, flat.view(torch.uint8).numpy().data)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._file.close()
            return
        self._file.flush()
        self._file.truncate(self._start + self._size)
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.replace(self.path)
