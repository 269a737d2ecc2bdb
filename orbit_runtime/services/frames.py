"""Messages between the processes of a run: a JSON tree, followed by the bytes of its arrays as they are in memory.

    ORB1 <bytes of the head, uint32> <head: {"tree": …, "sizes": […]}> <zeros up to 8> <block> <zeros up to 8> …

Numbers arrive unchanged, fp32 arrays to the bit. Only records of `types` travel, and nothing that is read is executed.

Belongs here: bytes. Does not belong here: the calls (`connection`, `host`).
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Buffer, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from orbit_runtime.digests import Piece
from orbit_runtime.errors import DataError
from orbit_runtime.storage import Part
from orbit_runtime.types import (
    Cached,
    Completion,
    Request,
    RoutedExperts,
    Sample,
    Sampling,
    Scored,
    UpdateResult,
)

Frame = Sequence[Buffer]
"""One message as consecutive pieces, so that large arrays are not copied."""

MAGIC = b"ORB1"
_HEAD = struct.Struct("<4sI")
_ALIGNED = 8
_LONG = 16
"""Tuples of numbers of at least this length travel as arrays."""
RECORDS: Mapping[str, type] = {
    kind.__name__: kind
    for kind in (Cached, Completion, Part, Piece, Request, RoutedExperts, Sample, Sampling, Scored, UpdateResult)
}
CODES = "bBhHiIqQfd"
CHUNK_BYTES = 1 << 20


def pack(value: Any) -> bytes:
    """The bytes of `frame` in one piece."""
    return b"".join(frame(value))


def frame(value: Any) -> Frame:
    """Encodes None, numbers, text, lists, tuples, dictionaries with text keys, arrays, bytes and `RECORDS`."""
    blocks: list[memoryview] = []
    tree = _encode(value, blocks)
    head = json.dumps({"tree": tree, "sizes": [each.nbytes for each in blocks]}, separators=(",", ":")).encode()
    parts: list[Buffer] = [_HEAD.pack(MAGIC, len(head)), head, _gap(_HEAD.size + len(head))]
    for block in blocks:
        parts += [block, _gap(block.nbytes)]
    return parts


def num_bytes(parts: Frame) -> int:
    return sum(memoryview(each).nbytes for each in parts)


def chunks(parts: Frame) -> Iterator[bytes]:
    """Chunks for a socket: small parts joined, large ones split."""
    waiting = bytearray()
    for part in parts:
        view = memoryview(part).cast("B")
        for start in range(0, view.nbytes, CHUNK_BYTES):
            waiting += view[start : start + CHUNK_BYTES]
            if len(waiting) >= CHUNK_BYTES:
                yield bytes(waiting)
                waiting.clear()
    if waiting:
        yield bytes(waiting)


def unpack(data: Buffer) -> Any:
    """Decodes a message; bytes are returned as views of `data`. Raises DataError if `pack` did not make it."""
    view = memoryview(data).cast("B")
    try:
        magic, length = _HEAD.unpack_from(view)
        if magic != MAGIC:
            raise ValueError("it does not begin as a frame")
        head = json.loads(bytes(view[_HEAD.size : _HEAD.size + length]))
        return _decode(head["tree"], list(_blocks(view, _HEAD.size + length, head["sizes"])))
    except (struct.error, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise DataError(
            f"a message between the run's processes cannot be read: {type(error).__name__}: {error}",
            fix="start all three with the same version of Orbit",
        ) from None


def _gap(size: int) -> bytes:
    return bytes(-size % _ALIGNED)


def _blocks(view: memoryview, position: int, sizes: list[int]) -> Iterator[memoryview]:
    for size in sizes:
        position += -position % _ALIGNED
        if type(size) is not int or size < 0 or position + size > view.nbytes:
            raise ValueError("it is cut off")
        yield view[position : position + size]
        position += size


def _encode(value: Any, blocks: list[memoryview]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, array):
        blocks.append(memoryview(value).cast("B"))
        return {"a": [value.typecode, len(blocks) - 1]}
    if isinstance(value, bytes | bytearray | memoryview):
        blocks.append(memoryview(value).cast("B"))
        return {"b": len(blocks) - 1}
    if isinstance(value, tuple):
        code = _code_of(value)
        if code is not None:
            return {"n": _encode(array(code, value), blocks)["a"]}
        return {"t": [_encode(each, blocks) for each in value]}
    if isinstance(value, list):
        return [_encode(each, blocks) for each in value]
    if isinstance(value, Mapping):
        assert all(type(key) is str for key in value), "keys are text"
        return {"d": {key: _encode(each, blocks) for key, each in value.items()}}
    name = type(value).__name__
    assert is_dataclass(value), f"{name} does not travel"
    assert RECORDS.get(name) is type(value), f"{name} does not travel"
    return {"r": [name, {each.name: _encode(getattr(value, each.name), blocks) for each in fields(value)}]}


def _code_of(value: tuple[Any, ...]) -> str | None:
    if len(value) < _LONG:
        return None
    kinds = set(map(type, value))
    return {int: "q", float: "d"}.get(kinds.pop()) if len(kinds) == 1 else None


def _decode(tree: Any, blocks: list[memoryview]) -> Any:
    if isinstance(tree, list):
        return [_decode(each, blocks) for each in tree]
    if not isinstance(tree, dict):
        return tree
    ((mark, held),) = tree.items()
    if mark == "a":
        return _array(held, blocks)
    if mark == "b":
        return blocks[held]
    if mark == "n":
        return tuple(_array(held, blocks))
    if mark == "t":
        return tuple(_decode(each, blocks) for each in held)
    if mark == "d":
        return {key: _decode(each, blocks) for key, each in held.items()}
    if mark == "r":
        return _record(held[0], held[1], blocks)
    raise ValueError(f"there is no mark {mark!r}")


def _array(held: Any, blocks: list[memoryview]) -> array[Any]:
    code, index = held
    if code not in CODES:
        raise ValueError(f"there are no arrays of {code!r}")
    found: array[Any] = array(code)
    found.frombytes(blocks[index])
    return found


def _record(name: str, held: Mapping[str, Any], blocks: list[memoryview]) -> Any:
    kind = RECORDS[name]
    values = {key: _decode(each, blocks) for key, each in held.items()}
    if kind is RoutedExperts:
        values["data"] = bytes(values["data"])
    return kind(**values)
