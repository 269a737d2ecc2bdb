"""Chooses the server for a prompt: the one that has most of it in its cache, unless that one is too busy.

Belongs here: the choice. Does not belong here: sending, waiting or knowing which servers are up (`answer_queue`).

A prompt is cut into blocks; a block's hash covers everything before it and the adapter, as the keys of KV caches do.
Loads are bounded as in consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2018): no server gets
more than `SLACK` times the mean, so a prefix that all prompts share does not send them all to one server.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence

SLACK = 1.25
BLOCK_TOKENS = 16
KEPT_BLOCKS = 1 << 16
"""Per server: 1M tokens, about what a cache holds."""


class PrefixRouter:
    """Remembers which prefixes went where. The same calls in the same order get the same results."""

    def __init__(self, count: int, capacity: int, *, kept_blocks: int = KEPT_BLOCKS) -> None:
        """Args: capacity: completions that one server samples at a time."""
        self._seen: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(count)]
        self._capacity = capacity
        self._kept = kept_blocks

    def choose(
        self, adapter: str | None, tokens: Sequence[int], cost: int, *, loads: Sequence[int], alive: Sequence[bool]
    ) -> int | None:
        """Index of the server for `cost` completions of this prompt; None if all live servers are busy.

        Args:
            loads: completions that each server samples now.
        """
        living = [index for index, is_alive in enumerate(alive) if is_alive]
        if not living:
            return None
        mean = (sum(loads[index] for index in living) + cost) / len(living)
        least = min(loads[index] for index in living)
        bound = min(self._capacity, max(least + cost, math.ceil(SLACK * mean)))
        free = [index for index in living if loads[index] == 0 or loads[index] + cost <= bound]
        if not free:
            return None
        blocks = list(_blocks(adapter, tokens))
        chosen = min(free, key=lambda index: (-self._matched(index, blocks), loads[index], index))
        self._remember(chosen, blocks)
        return chosen

    def forget(self, index: int) -> None:
        """Forgets a restarted server's prefixes, as its cache is empty."""
        self._seen[index].clear()

    def _matched(self, index: int, blocks: Sequence[int]) -> int:
        seen = self._seen[index]
        return next((count for count, block in enumerate(blocks) if block not in seen), len(blocks))

    def _remember(self, index: int, blocks: Sequence[int]) -> None:
        seen = self._seen[index]
        for block in blocks:
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > self._kept:
            seen.popitem(last=False)


def _blocks(adapter: str | None, tokens: Sequence[int]) -> Iterator[int]:
    """Hashes of the prefixes that end at block boundaries, and of the whole prompt."""
    before = hash(adapter or "")
    for start in range(0, len(tokens), BLOCK_TOKENS):
        before = hash((before, *tokens[start : start + BLOCK_TOKENS]))
        yield before
