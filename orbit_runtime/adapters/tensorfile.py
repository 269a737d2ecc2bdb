"""Safetensors with canonical bytes: equal tensors give equal files, whichever library version or insertion order.

Belongs here: tensors ↔ file bytes. Does not belong here: which tensors an adapter has (`state`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from orbit_runtime.model_info.headers import parse_header

_CODES = {torch.bfloat16: "BF16", torch.float32: "F32"}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def tensor_bytes(tensor: Tensor) -> bytes:
    """Little-endian, row by row."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def dump(tensors: Mapping[str, Tensor]) -> bytes:
    """Names sorted, the metadata that Hugging Face's loaders ask for, the header padded to 8 bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    chunks, position = [], 0
    for name in sorted(tensors):
        chunk = tensor_bytes(tensors[name])
        header[name] = {
            "dtype": _CODES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [position, position + len(chunk)],
        }
        chunks.append(chunk)
        position += len(chunk)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *chunks])


def parse(data: bytes, *, where: str) -> dict[str, Tensor]:
    """The tensors of a whole file; they share one private copy of its bytes. Other dtypes than BF16 and F32 raise `KeyError`."""
    header = parse_header(data, size=len(data), where=where)
    copy = bytearray(data)
    tensors = {}
    for name, info in header.tensors.items():
        count = math.prod(info.shape)
        if count == 0:
            tensors[name] = torch.empty(info.shape, dtype=_DTYPES[info.dtype])
            continue
        flat = torch.frombuffer(copy, dtype=_DTYPES[info.dtype], count=count, offset=header.data_start + info.start)
        tensors[name] = flat.view(info.shape)
    return tensors
