"""Safetensors with canonical bytes: equal tensors give equal files, whichever library version or insertion order.

Belongs here: tensors ↔ file bytes. Does not belong here: which tensors an adapter has (`state`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from orbit_runtime.model_info.headers import parse_header

_CODES = {torch.bfloat16: "BF16", torch.float32: "F32"}
_FORMAT = {"format": "pt"}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All values in one tensor: an adapter is many small tensors, and one operation on all of them is far faster."""
    with torch.no_grad():
        return torch.cat([tensor.reshape(-1) for tensor in tensors])


def split(values: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `flat`: views of `values` under the names and in the shapes of `like`."""
    parts = values.split_with_sizes([tensor.numel() for tensor in like.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(like.items(), parts, strict=True)}


def dump(tensors: Mapping[str, Tensor], dtype: torch.dtype, metadata: Mapping[str, str] = _FORMAT) -> bytes:
    """The file of these tensors, rounded to `dtype`. Names sorted; by default what Hugging Face's loaders ask for."""
    ordered = {name: tensors[name] for name in sorted(tensors)}
    return _file(ordered, flat(ordered.values()).to(dtype) if ordered else torch.empty(0, dtype=dtype), metadata)


def dump_narrowed(tensors: Mapping[str, Tensor]) -> bytes:
    """The file of tensors widened from BF16: BF16 where narrowing all of them is exact, fp32 where it is not."""
    ordered = {name: tensors[name] for name in sorted(tensors)}
    if not ordered:
        return _file({}, torch.empty(0))
    values = flat(ordered.values())
    narrow = _narrow(values)
    return _file(ordered, values.float() if narrow is None else narrow)


def narrowed(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """These tensors as BF16 where narrowing all of them is exact, else as they are: what is dumped more than once."""
    narrow = _narrow(flat(tensors.values())) if tensors else None
    return tensors if narrow is None else split(narrow, tensors)


def _narrow(values: Tensor) -> Tensor | None:
    """As BF16; None where that changes a value."""
    if values.dtype == torch.bfloat16:
        return values
    narrow = values.to(torch.bfloat16)
    # As integers: NaN equals nothing, and the sign of a zero must show.
    bits = _BITS[values.element_size()]
    return narrow if torch.equal(narrow.to(values.dtype).view(bits), values.view(bits)) else None


def tensor_digest(tensor: Tensor) -> str:
    """Of shape and values: as BF16 where that is exact, else as fp32, so that widening changes nothing."""
    values = tensor.detach().reshape(-1).cpu()
    narrow = values.to(torch.bfloat16)
    exact = torch.equal(narrow.float(), values.float())
    kept = narrow if exact else values.float()
    digest = hashlib.sha256(f"{tuple(tensor.shape)}{kept.dtype}".encode())
    digest.update(kept.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _file(ordered: Mapping[str, Tensor], values: Tensor, metadata: Mapping[str, str] = _FORMAT) -> bytes:
    """The header (padded to 8 bytes) and the values in little-endian order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for name, tensor in ordered.items():
        end = position + tensor.numel() * values.element_size()
        header[name] = {"dtype": _CODES[values.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, values.cpu().view(torch.uint8).numpy().tobytes()])


def parse(data: bytes, *, where: str) -> dict[str, Tensor]:
    """The tensors of a file, on one private copy of its bytes. Dtypes other than BF16 and F32 raise `KeyError`."""
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
