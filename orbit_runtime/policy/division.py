"""What a policy asks of the processes that hold the rest of its model, and how they divide the tokens of a pass.

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
"""A process's place among several, and how many they are."""


class Division(Protocol):
    """Of one process of several that compute a pass together."""

    context: Turn
    """Among the processes that divide a pass's tokens."""

    def meet_tokens(self, own_TN: Tensor) -> Tensor:
        """Rows of this process's tokens → of all. Backward adds up what every process contributed to each."""
        ...

    def own_targets(self, batch: PackedBatch) -> tuple[Tensor, Tensor] | None:
        """See `PackedBatch`."""
        ...

    def join_targets(self, own_XR: Tensor, index_R: Tensor, count: int) -> Tensor:
        """`[X, count]` from what each process found of its own targets. Backward gives each its own."""
        ...

    def remembered(self) -> Callable[[], AbstractContextManager[None]]:
        """A context in which the pass that is under way now goes on: for a layer that runs again later."""
        ...


def own_tokens(num_tokens: int, context: Turn) -> tuple[range, range]:
    """Two runs, one from each end: a late token sees more keys than an early one, and so all have as much to do.

    `num_tokens` is a multiple of twice the processes.

    Example: `own_tokens(8, (0, 2)) == (range(0, 2), range(6, 8))`.
    """
    place, count = context
    size = num_tokens // (2 * count)
    mirrored = 2 * count - 1 - place
    return range(place * size, (place + 1) * size), range(mirrored * size, (mirrored + 1) * size)
