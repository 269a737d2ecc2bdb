"""Tokens before their completion has ended: what an engine tells that is asked for streams.

Belongs here: the record, and what such an engine can do besides. Does not belong here: completions (`types.Engine`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from orbit_runtime.types import FLOATS, TOKENS, Engine

Alternatives = tuple[array[int], array[float]]
"""As in `Completion.alternatives`."""
NONE = (-1, float("-inf"))
"""Stands for an alternative that there is none of."""


def part_of(alternatives: Alternatives, count: int, start: int, end: int) -> Alternatives:
    """Of the tokens `[start, end)`. Args: count: alternatives of each token."""
    return alternatives[0][start * count : end * count], alternatives[1][start * count : end * count]


def with_more(so_far: Alternatives | None, more: Alternatives) -> Alternatives:
    """Those so far with those of the next tokens, added where they lie: a long answer's are never copied again.

    Args:
        so_far: what this gave before; None: nothing yet.
    """
    ids, logprobs = so_far or (array(TOKENS), array(FLOATS))
    ids.extend(more[0])
    logprobs.extend(more[1])
    return ids, logprobs


@dataclass(frozen=True, slots=True)
class News:
    """Tokens that came of several requests, those of one after those of the other; columns, as there is one a step."""

    request_ids_D: array[int]
    """int64. One of which several pieces came meanwhile stands there several times."""
    counts_D: array[int]
    """int32: how many of the tokens belong to each."""
    token_ids_T: array[int]
    logprobs_T: array[float]
    alternatives: Mapping[int, Alternatives]
    """Of these tokens, by request that asked for them: once, of all its pieces."""


class StreamingEngine(Engine, Protocol):
    """One that tells tokens before their completion has ended."""

    @property
    def under_way(self) -> Collection[int]:
        """Requests that a completion is still to come of. The caller's, as `submit` is."""
        ...

    def listen(self, tell: Callable[[], None] | None) -> None:
        """Args: tell: called by whoever takes completions, between two of them, where `news` may have something."""
        ...

    def news(self) -> News | None:
        """What came of streamed requests since it was last asked, each token once and in order; None: nothing.

        What is not asked for before a completion is handed out is told by that one alone.
        """
        ...
