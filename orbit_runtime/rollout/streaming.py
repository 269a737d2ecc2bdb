"""Tokens reported before their completion ends, for streaming."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from orbit_runtime.types import FLOATS, TOKENS, Engine

Alternatives = tuple[array[int], array[float]]
"""See `Completion.alternatives`."""
NONE = (-1, float("-inf"))
"""Placeholder for a missing alternative."""
LEAST_LOGPROB = -1e4
"""SGLang writes the lowest representable number for a token that cannot follow."""


def part_of(alternatives: Alternatives, count: int, start: int, end: int) -> Alternatives:
    """Alternatives of the tokens `[start, end)`. Args: count: alternatives of each token."""
    return alternatives[0][start * count : end * count], alternatives[1][start * count : end * count]


def with_more(so_far: Alternatives | None, more: Alternatives) -> Alternatives:
    """Appends the alternatives of the next tokens in place, so those of a long completion are never copied again.

    Args:
        so_far: an earlier result; None for the first.
    """
    ids, logprobs = so_far or (array(TOKENS), array(FLOATS))
    ids.extend(more[0])
    logprobs.extend(more[1])
    return ids, logprobs


def take_events(held: bytearray, piece: bytes) -> list[str]:
    """What the whole lines of `data:` hold; the rest stays in `held`. Only a line feed ends a line: for httpx, U+0085
    and U+2028 do too, which servers leave as they are in a JSON text."""
    held += piece
    if b"\n" not in piece:
        return []
    *lines, held[:] = held.split(b"\n")
    return [line[5:].decode(errors="replace").strip() for line in lines if line.startswith(b"data:")]


@dataclass(frozen=True, slots=True)
class TokenDeltas:
    """New tokens of several requests, request after request; as columns, because there is one record per step."""

    request_ids_D: array[int]
    """int64. A request with several new pieces appears several times."""
    counts_D: array[int]
    """int32: how many of the tokens belong to each entry."""
    token_ids_T: array[int]
    logprobs_T: array[float]
    alternatives: Mapping[int, Alternatives]
    """Request → alternatives of all its new tokens, over all its entries; for requests that asked for them."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled as bytes: the engine does so after every step, and an array's own way takes twenty times as long.
        columns = (self.request_ids_D, self.counts_D, self.token_ids_T, self.logprobs_T)
        return _from_bytes, (*(column.tobytes() for column in columns), self.alternatives)


def _from_bytes(
    request_ids: bytes, counts: bytes, token_ids: bytes, logprobs: bytes, alternatives: Mapping[int, Alternatives]
) -> TokenDeltas:
    return TokenDeltas(
        array("q", request_ids),
        array(TOKENS, counts),
        array(TOKENS, token_ids),
        array(FLOATS, logprobs),
        alternatives,
    )


class StreamingEngine(Engine, Protocol):
    """An engine that reports tokens before their completion ends."""

    @property
    def under_way(self) -> Collection[int]:
        """Ids of requests without a completion yet. For the caller's thread, as `submit` is."""

    def listen(self, tell: Callable[[], None] | None) -> None:
        """Makes the engine call `tell`, between completions and from the consumer's thread, when `take_deltas` may have
        something.
        """

    def take_deltas(self) -> TokenDeltas | None:
        """New tokens of streamed requests since the last call, each token once and in order; None if there are none.

        Tokens not collected before the completion is handed out are reported by the completion alone.
        """
