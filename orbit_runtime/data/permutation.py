"""Permutations that depend only on a key, so that an order needs no state."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import overload

SORTED_PROMPTS = 1 << 20
"""Beyond this number, the order is computed one place at a time: sorting would take gigabytes."""


def shuffled(count: int, key: int) -> Sequence[int]:
    """A permutation of `range(count)` that depends on (count, key) only: indexes sorted by their keyed hash, or above
    `SORTED_PROMPTS` a permutation whose places are computed on access."""
    if count > SORTED_PROMPTS:
        return Permutation(count, key)
    key_bytes = key.to_bytes(8, "little")

    def rank(index: int) -> bytes:
        return hashlib.blake2b(index.to_bytes(8, "little"), key=key_bytes, digest_size=8).digest()

    return sorted(range(count), key=rank)


class Permutation(Sequence[int]):
    """A pseudorandom permutation of `range(count)` that takes no memory.

    A Feistel network of four rounds over two halves of the bits (Luby and Rackoff, 1988), applied repeatedly until the
    result is within the range (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002): fewer than four times
    on average.
    """

    def __init__(self, count: int, key: int, chosen: range | None = None) -> None:
        self._count, self._key = count, key
        self._half = max(1, ((count - 1).bit_length() + 1) // 2)
        self._chosen = range(count) if chosen is None else chosen

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Permutation: ...
    def __getitem__(self, index: int | slice) -> int | Permutation:
        if isinstance(index, slice):
            return Permutation(self._count, self._key, self._chosen[index])
        place = self._chosen[index]
        while (place := self._turned(place)) >= self._count:
            pass
        return place

    def _turned(self, value: int) -> int:
        mask = (1 << self._half) - 1
        left, right = value >> self._half, value & mask
        for turn in range(4):
            mixed = hashlib.blake2b(
                right.to_bytes(8, "little"), key=self._key.to_bytes(8, "little"), salt=bytes([turn]), digest_size=8
            )
            left, right = right, left ^ (int.from_bytes(mixed.digest(), "little") & mask)
        return left << self._half | right
