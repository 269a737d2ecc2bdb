"""The interface of a policy to the processes that hold the rest of its model, and how they divide a pass's tokens.

Belongs here: the protocol and that division. Does not belong here: which weights a process holds (`shares`),
collectives (`training.megatron`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from orbit_runtime.policy.packed import PackedBatch

Turn = tuple[int, int]
"""A process's index among several, and their number."""


class Division(Protocol):
    """One of several processes that compute a pass together."""

    context: Turn
    """Turn among the processes that divide a pass's tokens."""

    def meet_tokens(self, own_TN: Tensor) -> Tensor:
        """Rows of this process's tokens → rows of all tokens. Backward sums every process's gradient for each row."""
        ...

    def own_targets(self, batch: PackedBatch) -> tuple[Tensor, Tensor] | None:
        """See `PackedBatch`."""
        ...

    def join_targets(self, own_XR: Tensor, index_R: Tensor, count: int) -> Tensor:
        """`[X, count]` from each process's values for its own targets. Backward returns each process its own."""
        ...

    def remembered(self) -> Callable[[], AbstractContextManager[None]]:
        """A context that restores the state of the current pass, for a layer that is recomputed later."""
        ...


def own_tokens(num_tokens: int, context: Turn) -> tuple[range, range]:
    """Two runs, one from each end: a late token sees more keys than an early one, so this balances the work.

    `num_tokens` is a multiple of twice the number of processes.

    Example: `own_tokens(8, (0, 2)) == (range(0, 2), range(6, 8))`.
    """
    place, count = context
    size = num_tokens // (2 * count)
    mirrored = 2 * count - 1 - place
    return range(place * size, (place + 1) * size), range(mirrored * size, (mirrored + 1) * size)
