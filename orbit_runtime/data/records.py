"""The rollout record on disk: one JSON object per line, with a step's lines compressed together.

Belongs here: the exact round trip of `Rollout`. Does not belong here: where the file is kept (`storage`).
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson
import zstandard

from orbit_runtime.errors import DataError, InternalError
from orbit_runtime.types import FLOATS, TOKENS, Rollout, RoutedExperts, TopTokens, Turn

MAX_BYTES = 1 << 34
"""A decompressed line larger than this is refused, so that a corrupt size cannot exhaust memory. A step may be larger:
the experts of one answer of 100,000 tokens can take 100 MB."""
FED_BYTES = (1 << 6, 1 << 10)
"""Compressed bytes unpacked at a time, of bytes that become many and of others: each becomes 64 KiB at most."""


def rollout_to_line(rollout: Rollout) -> bytes:
    """JSON of the record's fields by name; bytes, and the arrays of `teacher_top`, in base64. Floats keep every bit; a
    non-finite float is a bug and is refused."""
    numbers = (math.fsum(rollout.logprobs_T), math.fsum(rollout.teacher_logprobs_T or ()), rollout.reward or 0.0)
    if not all(map(math.isfinite, numbers)):
        raise InternalError(
            "a rollout holds a NaN or infinite number", where=f"{rollout.prompt_id}[{rollout.sample_index}]"
        )
    if rollout.teacher_top is not None:
        # As text these numbers would take three times the room, and as Python objects ten times.
        held: Any = tuple(each.tobytes() for each in rollout.teacher_top)
        rollout = replace(rollout, teacher_top=held)
    return orjson.dumps(rollout, default=_plain)


def rollout_from_line(line: bytes | str) -> Rollout:
    """The record that `rollout_to_line` wrote."""
    row = orjson.loads(line)
    return Rollout(
        run=row["run"],
        step=row["step"],
        prompt_id=row["prompt_id"],
        sample_index=row["sample_index"],
        turns=tuple(Turn(each["role"], each["start"], each["end"], each["text"]) for each in row["turns"]),
        token_ids_T=row["token_ids_T"],
        loss_mask_T=row["loss_mask_T"],
        logprobs_T=row["logprobs_T"],
        versions_T=row["versions_T"],
        reward=row["reward"],
        outcome=row["outcome"],
        reward_parts=row["reward_parts"],
        finish_reason=row["finish_reason"],
        routed_experts=_build_experts(row["routed_experts"]),
        counts=row.get("counts", {}),
        teacher_logprobs_T=row.get("teacher_logprobs_T"),
        teacher_top=_build_top(row.get("teacher_top")),
        cohort=row.get("cohort", ""),
    )


def compress_rollouts(rollouts: Iterable[Rollout], trained: Iterable[Mapping[str, Any]] | None = None) -> bytes:
    """The bytes of `rollouts/step-*.jsonl.zst`.

    Args: trained: how each was trained, by name; empty where it was not.
    """
    lines = (rollout_to_line(rollout) for rollout in rollouts)
    if trained is not None:
        # What belongs to the step and not to the rollout; `rollout_from_line` ignores it.
        pairs = zip(lines, trained, strict=True)
        lines = (line[:-1] + b"," + orjson.dumps(each)[1:] if each else line for line, each in pairs)
    return zstandard.ZstdCompressor(level=3).compress(b"".join(line + b"\n" for line in lines))


def decompress_rollouts(data: bytes, *, where: str = "rollouts") -> list[Rollout]:
    """The records of a step's file.

    Raises:
        DataError: the bytes are not such a file.
    """
    try:
        return [rollout_from_line(line) for line in decompressed_lines(data)]
    except (zstandard.ZstdError, orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        fix = "restore the file from a copy of the run folder"
        raise DataError(f"the file of rollouts is damaged: {error}", where=where, fix=fix) from error


def decompressed_lines(data: bytes) -> Iterator[bytes]:
    """Yields lines that are not empty, without line ends; only a few lines are in memory at a time.

    Raises:
        ValueError: a line has more than `MAX_BYTES`. ZstdError: the bytes are damaged or cut off.
    """
    pending: list[bytes] = []
    size = 0
    for piece in unpacked([data]):
        first, *others = piece.split(b"\n")
        pending.append(first)
        size += len(first)
        for part in others:
            if whole := b"".join(pending):
                yield whole
            pending, size = [part], len(part)
        if size > MAX_BYTES:
            raise ValueError(f"a line of more than {MAX_BYTES} bytes")
    if last := b"".join(pending):
        yield last


def unpacked(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The content of a zstd file, a few megabytes at a time.

    zstandard's own readers take the end of a file that is cut off for the end of its last frame.

    Args: chunks: the file's bytes.

    Raises:
        ZstdError: the bytes are damaged or cut off.
    """
    frame, size, fed = None, 0, FED_BYTES[0]
    for chunk in chunks:
        at = 0
        while at < len(chunk):
            rest, at = chunk[at : at + fed], at + fed
            while rest:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                piece = frame.decompress(rest)
                size += len(piece)
                yield piece
                if piece:
                    fed = min(2 * fed, FED_BYTES[1]) if len(piece) < 1 << 18 else FED_BYTES[0]
                rest, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise zstandard.ZstdError(f"it is cut off after {size} unpacked bytes")


def _plain(value: Any) -> Any:
    if isinstance(value, array):
        return value.tolist()
    return base64.b64encode(value).decode() if isinstance(value, bytes) else dict(value)


def _build_experts(row: Mapping[str, Any] | None) -> RoutedExperts | None:
    if row is None:
        return None
    tokens, layers, experts = row["shape"]
    return RoutedExperts((tokens, layers, experts), base64.b64decode(row["data"]))


def _build_top(row: Sequence[str] | None) -> TopTokens | None:
    if row is None:
        return None
    told_ids, told_logprobs = row
    ids: array[int] = array(TOKENS)
    ids.frombytes(base64.b64decode(told_ids))
    logprobs: array[float] = array(FLOATS)
    logprobs.frombytes(base64.b64decode(told_logprobs))
    return ids, logprobs
