"""Safetensors with canonical bytes: equal tensors give equal files, for any library version and insertion order.

Belongs here: tensors ↔ file bytes. Does not belong here: which tensors an adapter has (`state`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Buffer, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import torch
from torch import Tensor

from orbit_runtime.adapters.pages import room
from orbit_runtime.digests import IN_FLIGHT_BYTES, PIECE_BYTES, PieceHasher, Pieces, cut, hash_pieces
from orbit_runtime.model_info.headers import parse_header

_CODES = {torch.bfloat16: "BF16", torch.float32: "F32"}
FORMAT = {"format": "pt"}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_NARROW = torch.bfloat16.itemsize
_CACHED_BYTES = 1 << 20
"""Bytes of host values converted at a time: what one operation writes is in a core's cache for the next."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All values in one tensor: an adapter has many small tensors, and one operation on all of them is far faster."""
    with torch.no_grad():
        return torch.cat([tensor.reshape(-1) for tensor in tensors])


def split(values: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `flat`: views of `values` with the names and shapes of `like`."""
    parts = values.split_with_sizes([tensor.numel() for tensor in like.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(like.items(), parts, strict=True)}


@dataclass(frozen=True)
class TensorFile:
    """A file that is not written yet: no values are computed before they are requested.

    The pieces are those of `digests`: the header, then each tensor, sorted by name.
    """

    header: bytes
    tensors: Mapping[str, Tensor]
    """Sorted by name."""
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return len(self.header) + sum(tensor.numel() for tensor in self.tensors.values()) * self.dtype.itemsize

    def pieces(self) -> Iterator[memoryview]:
        """Valid as long as the tensors do not change. At most two of the largest pieces exist at a time.

        Tensors whose bytes are already on this machine are not copied, and no torch operation runs: the pieces can be
        read during a computation without taking its threads away.
        """
        yield memoryview(self.header)
        if all(_lies_ready(tensor, self.dtype) for tensor in self.tensors.values()):
            for tensor in self.tensors.values():
                yield from cut(_bytes(tensor.detach().view(-1)))
            return
        yield from runs(self.tensors.values(), lambda values: _rounded(values, self.dtype), self.dtype.itemsize)


def build(tensors: Mapping[str, Tensor], dtype: torch.dtype, metadata: Mapping[str, str] = FORMAT) -> TensorFile:
    """The file of these tensors, rounded to `dtype`, names sorted; by default with Hugging Face's metadata."""
    ordered = {name: tensors[name] for name in sorted(tensors)}
    header = build_header({name: tensor.shape for name, tensor in ordered.items()}, dtype, metadata)
    return TensorFile(header, ordered, dtype)


def dump(tensors: Mapping[str, Tensor], dtype: torch.dtype, metadata: Mapping[str, str] = FORMAT) -> bytes:
    """The bytes of `build` in one piece."""
    return b"".join(build(tensors, dtype, metadata).pieces())


def dump_narrowed(tensors: Mapping[str, Tensor]) -> bytes:
    """The file of tensors widened from BF16: BF16 if narrowing all of them is exact, otherwise fp32."""
    narrow = narrowed(tensors)
    is_narrow = all(tensor.dtype == torch.bfloat16 for tensor in narrow.values())
    return dump(narrow, torch.bfloat16 if is_narrow and tensors else torch.float32)


def runs(
    tensors: Iterable[Tensor], convert: Callable[[Tensor], Tensor], itemsize: int, *, host_group: int = PIECE_BYTES
) -> Iterator[memoryview]:
    """The bytes of each tensor, little-endian, in pieces as defined in `digests`.

    Small tensors are converted and copied from their device many at a time, large ones in parts.

    Args:
        convert: function of one-dimensional values.
        itemsize: bytes per value by which large tensors are split; at most four.
        host_group: bytes of small tensors that are converted together, if they are on the host.
    """
    for group in _groups(tensors, host_group):
        if isinstance(group, Tensor):
            for part in group.detach().reshape(-1).split(PIECE_BYTES // itemsize):
                yield _bytes(convert(part))
            continue
        values = convert(_adjacent(group))
        data, position = _bytes(values), 0
        for tensor in group:
            end = position + tensor.numel() * values.element_size()
            yield from cut(data[position:end])
            position = end


def narrow_where_exact(values: Tensor) -> Tensor:
    """The values in BF16 if none of them changes by that, otherwise in fp32: reverses a widening."""
    narrow = _narrow(values)
    return values.float() if narrow is None else narrow


def assemble(shapes: Mapping[str, Sequence[int]], pieces: Mapping[str, Pieces]) -> Pieces:
    """The pieces of the BF16 file of these tensors, each given by its shape and pieces. Nothing is read."""
    ordered = {name: shapes[name] for name in sorted(shapes)}
    header = hash_pieces([build_header(ordered, torch.bfloat16, FORMAT)])
    return (*header, *chain.from_iterable(pieces[name] for name in ordered))


class TensorHasher[K]:
    """The pieces of each named tensor, narrowed if that is exact; they are hashed as they go by, in other threads.

    A tensor must not change before `result`. Few of them at a time are kept.
    """

    def __init__(self, in_flight_bytes: int = IN_FLIGHT_BYTES) -> None:
        """Args: in_flight_bytes: see `PieceHasher`."""
        self._hasher = PieceHasher(in_flight_bytes)
        self._counts: dict[K, int] = {}

    def add(self, tensors: Iterable[tuple[K, Tensor]]) -> None:
        """Each name once."""
        for piece in runs(self._counted(tensors), narrow_where_exact, _NARROW, host_group=_CACHED_BYTES):
            self._hasher.add(piece)

    def _counted(self, tensors: Iterable[tuple[K, Tensor]]) -> Iterator[Tensor]:
        for name, tensor in tensors:
            self._counts[name] = -(-tensor.numel() * _NARROW // PIECE_BYTES)
            yield tensor

    def result(self) -> dict[K, Pieces]:
        pieces = iter(self._hasher.result())
        return {name: tuple(islice(pieces, count)) for name, count in self._counts.items()}


def tensor_pieces[K](tensors: Iterable[tuple[K, Tensor]]) -> dict[K, Pieces]:
    """Pieces of every tensor, computed by `TensorHasher`."""
    hasher = TensorHasher[K]()
    hasher.add(tensors)
    return hasher.result()


def narrowed(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """These tensors as BF16 if narrowing all of them is exact, otherwise unchanged; for repeated dumps."""
    narrow = _narrow(flat(tensors.values())) if tensors else None
    return tensors if narrow is None else split(narrow, tensors)


def are_finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(values.isfinite().all()) for values in _flat_groups(tensors))


def widened(tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies in one block of new memory; small tensors are moved many at a time."""
    values = torch.empty(sum(tensor.numel() for tensor in tensors.values()), device=device, dtype=dtype)
    position = 0
    for part in _flat_groups(tensors.values()):
        values[position : position + len(part)].copy_(part)
        position += len(part)
    return split(values, tensors)


def _flat_groups(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for group in _groups(tensors):
        if isinstance(group, Tensor):
            yield from group.detach().reshape(-1).split(PIECE_BYTES // 4)
        else:
            yield flat(group)


def _narrow(values: Tensor) -> Tensor | None:
    """The values in BF16; None if one changes by that."""
    if values.dtype == torch.bfloat16:
        return values
    if values.dtype == torch.float32 and values.device.type == "cpu":
        # The upper half of each: a quarter of the time that comparing takes.
        words = values.detach().numpy().view(np.uint32)
        if np.bitwise_or.reduce(words) & 0xFFFF:
            return None
        upper = np.empty(words.shape, np.uint16)
        np.right_shift(words, 16, out=upper, casting="unsafe")
        return torch.from_numpy(upper).view(torch.bfloat16)
    narrow = values.to(torch.bfloat16)
    # Compared as integers: NaN equals nothing, and the sign of a zero must count.
    bits = _BITS[values.element_size()]
    return narrow if torch.equal(narrow.to(values.dtype).view(bits), values.view(bits)) else None


def tensor_digest(tensor: Tensor) -> str:
    """Digest of shape and values: as BF16 if that is exact, otherwise fp32, so that widening changes nothing."""
    values = tensor.detach().reshape(-1).cpu()
    narrow = values.to(torch.bfloat16)
    exact = torch.equal(narrow.float(), values.float())
    kept = narrow if exact else values.float()
    digest = hashlib.sha256(f"{tuple(tensor.shape)}{kept.dtype}".encode())
    digest.update(kept.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def build_header(ordered: Mapping[str, Sequence[int]], dtype: torch.dtype, metadata: Mapping[str, str]) -> bytes:
    """The header of a file of these tensors, padded to 8 bytes.

    Args:
        ordered: name → shape.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for name, shape in ordered.items():
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _adjacent(tensors: Sequence[Tensor]) -> Tensor:
    """`flat`, without a copy if the tensors follow each other in memory, as the rows of one tensor do."""
    first, size = tensors[0].detach(), 0
    for tensor in tensors:
        if not (
            tensor.is_contiguous()
            and tensor.dtype == first.dtype
            and tensor.device == first.device
            and tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and tensor.storage_offset() == first.storage_offset() + size
        ):
            return flat(tensors)
        size += tensor.numel()
    return first.as_strided((size,), (1,))


def _groups(tensors: Iterable[Tensor], host_group: int = PIECE_BYTES) -> Iterator[Tensor | list[Tensor]]:
    """Yields a large tensor alone, and small ones together until they fill a piece or a group, in order."""
    group: list[Tensor] = []
    size = 0
    for tensor in tensors:
        # Whatever the target dtype, a value has at most four bytes.
        num_bytes = 4 * tensor.numel()
        limit = host_group if tensor.device.type == "cpu" else PIECE_BYTES
        if group and size + num_bytes > limit:
            yield group
            group, size = [], 0
        if num_bytes > limit:
            yield tensor
        elif num_bytes:
            group.append(tensor)
            size += num_bytes
    if group:
        yield group


def _lies_ready(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype and tensor.device.type == "cpu" and tensor.is_contiguous()


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Flat values in `dtype`, on the host."""
    # A device rounds before copying, which halves the transferred bytes.
    given = values if values.device.type == "cpu" else values.to(dtype)
    return room(values.numel(), dtype).copy_(given)


def _bytes(values: Tensor) -> memoryview:
    return memoryview(values.detach().cpu().view(torch.uint8).numpy()).cast("B")


def parse(data: Buffer, *, where: str) -> dict[str, Tensor]:
    """The tensors of a file: views of its bytes if those are writable, otherwise of one private copy.

    Raises `KeyError` for dtypes other than BF16 and F32.
    """
    view = memoryview(data).cast("B")
    header = parse_header(view, size=view.nbytes, where=where)
    copy = bytearray(view) if view.readonly else view
    tensors = {}
    for name, info in header.tensors.items():
        count = math.prod(info.shape)
        if count == 0:
            tensors[name] = torch.empty(info.shape, dtype=_DTYPES[info.dtype])
            continue
        flat = torch.frombuffer(copy, dtype=_DTYPES[info.dtype], count=count, offset=header.data_start + info.start)
        tensors[name] = flat.view(info.shape)
    return tensors
