"""The experts that rollout chose, in as few bits as represent them exactly.

A rollout of 100,000 tokens through 60 layers with 8 experts each is 96 MB as 16-bit numbers. Ids are nearly random, so
the only compression is to store just the bits that they need: nine for 384 experts, hence 54 MB.

Legend: `T` tokens that were an input, `L` layers with routed experts, `C` experts chosen per token.
"""

from __future__ import annotations

import math

import numpy as np

from orbit_runtime.errors import DataError
from orbit_runtime.types import RoutedExperts

MOST_BITS = 15


def pack_experts(chosen_TLC: np.ndarray) -> RoutedExperts:
    """Args: chosen_TLC: integers from 0 to 2^15 - 1."""
    ids = chosen_TLC.astype(np.uint16).reshape(-1)
    bits = int(ids.max()).bit_length() if ids.size else 0
    planes = [np.packbits((ids >> bit).astype(np.uint8) & 1) for bit in range(bits)]
    tokens, layers, experts = chosen_TLC.shape
    return RoutedExperts((tokens, layers, experts), b"".join(plane.tobytes() for plane in planes))


def unpack_experts(routed: RoutedExperts) -> np.ndarray:
    """int16 `[T, L, C]`.

    Raises:
        DataError: the bytes are not such an array.
    """
    count = math.prod(routed.shape)
    size = math.ceil(count / 8)
    if len(routed.data) % max(size, 1) or len(routed.data) > MOST_BITS * size:
        raise DataError(f"{len(routed.data)} bytes of experts for {routed.shape}", where="rollouts")
    chosen = np.zeros(count, np.int16)
    for bit, start in enumerate(range(0, len(routed.data), max(size, 1))):
        plane = np.frombuffer(routed.data, np.uint8, size, start)
        chosen |= np.unpackbits(plane, count=count).astype(np.int16) << bit
    return chosen.reshape(routed.shape)
