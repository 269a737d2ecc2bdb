"""Reads samples one record at a time, from files of a step's rollouts or of an evaluation's samples.

Belongs here: reading such a file in pieces, so that neither it nor a line's columns of tokens are held, and a record as
people read it. Does not belong here: which of them a page shows (`pairs`, `groups`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
import zstandard

from orbit_runtime.data.records import unpacked
from orbit_runtime.errors import OrbitError

READ_BYTES = 1 << 22
"""Bytes of the file read at a time."""
MAX_LINE = 1 << 28
"""Most bytes of a record; longer ones are not read, so that a corrupt size cannot exhaust memory."""
HEAD, TAIL = 400, 200
"""Characters shown of a longer text: its beginning, and its end, where the answer is."""


class Ranged(Protocol):
    """The part of `storage.Store` that reading needs."""

    def size(self, key: str) -> int: ...

    def get_range(self, key: str, start: int, end: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class File:
    """Samples of one policy."""

    step: int
    """Steps for which the policy had been trained, or the step in which the samples were drawn."""
    key: str


@dataclass(frozen=True, slots=True)
class ShownSample:
    """One sampled answer, for display. Its text is untrusted."""

    prompt_id: str
    sample_index: int
    prompt: str
    """Everything before the policy's first turn."""
    completion: str
    """Everything after the prompt: the policy's turn, or all turns with their roles."""
    reward: float | None
    parts: Mapping[str, float | None]
    """Reward → value, if there are several rewards."""
    outcome: str
    finish_reason: str
    tokens: int | None
    """Number of tokens that the policy sampled."""
    advantage: float | None
    """Mean advantage over its tokens; None if it was not trained on, or not recorded."""
    token_values: Sequence[Any] = ()
    """Its first tokens with text, log-prob, advantage and policy version, where they were recorded."""
    expected: str = ""
    environment: str = ""
    """Environment of an evaluation's sample."""


def read_samples(source: Ranged, key: str, *, most_bytes: int | None = None) -> Iterator[tuple[ShownSample, int]]:
    """Yields the records in order, each with the bytes read up to its end.

    A missing or broken part ends the file early: a page must not fail on a broken run.
    """
    read = 0
    for line in read_lines(source, key):
        read += len(line)
        try:
            sample = build_sample(orjson.loads(_without_columns(line)))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            continue
        yield sample, read
        if most_bytes is not None and read >= most_bytes:
            return


def _without_columns(line: bytes) -> bytes:
    """A record without its per-token columns, dropped before parsing; of the mask, the sum is kept.

    Within a JSON string, quotes are escaped, so that no text is mistaken for a column.
    """
    for name in _COLUMNS:
        start = line.find(name)
        if start >= 0:
            start += len(name)
            end = line.index(b"]", start)
            kept = str(line.count(b"1", start, end)).encode() if name == _MASK else b""
            line = line[:start] + kept + line[end:]
    return line


_MASK = b'"loss_mask_T":['
_COLUMNS = (b'"token_ids_T":[', _MASK, b'"logprobs_T":[', b'"versions_T":[')


def read_lines(source: Ranged, key: str) -> Iterator[bytes]:
    """Lines of a compressed file that is read in pieces."""
    pending: list[bytes] = []
    size = 0
    try:
        end = source.size(key)
        ranges = ((at, min(end, at + READ_BYTES)) for at in range(0, end, READ_BYTES))
        for piece in unpacked(source.get_range(key, *each) for each in ranges):
            *lines, rest = piece.split(b"\n")
            for line in lines:
                yield b"".join([*pending, line])
                pending, size = [], 0
            pending.append(rest)
            size += len(rest)
            if size > MAX_LINE:
                return
    except (zstandard.ZstdError, OrbitError):
        return
    if size:
        yield b"".join(pending)


def build_sample(record: Mapping[str, Any]) -> ShownSample:
    """Builds a sample from a rollout's record or an evaluation's."""
    turns = [_turn(turn) for turn in record["turns"]]
    first = next((at for at, (role, _) in enumerate(turns) if role == "assistant"), len(turns))
    asked, said = turns[:first], turns[first:]
    mask = record.get("loss_mask_T")
    usage = record.get("usage") or {}
    parts = record.get("reward_parts") or {}
    return ShownSample(
        prompt_id=str(record["prompt_id"]),
        sample_index=int(record["sample_index"]),
        prompt="\n".join(text for _, text in asked),
        completion=said[0][1] if len(said) == 1 else "\n".join(f"{role}: {text}" for role, text in said),
        reward=_number(record["reward"]),
        parts={str(name): _number(value) for name, value in parts.items()} if len(parts) > 1 else {},
        outcome=str(record["outcome"]),
        finish_reason=str(record["finish_reason"]),
        tokens=sum(mask) if mask is not None else usage.get("completion_tokens"),
        advantage=_number(record.get("advantage")),
        token_values=record.get("tokens") or (),
        expected=str(record.get("expected") or ""),
        environment=str(record.get("environment") or ""),
    )


def _turn(turn: Mapping[str, Any] | Sequence[str]) -> tuple[str, str]:
    role, text = (turn["role"], turn["text"]) if isinstance(turn, Mapping) else (turn[0], turn[1])
    return str(role), str(text)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def shorten(text: str, head: int = HEAD, tail: int = TAIL) -> str:
    """The beginning and end of a text, and the count of characters left out."""
    left = len(text) - head - tail
    return text if left <= 0 else f"{text[:head]} … ({left} more characters) … {text[len(text) - tail :]}"
