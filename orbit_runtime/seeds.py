"""Counter-based randomness: every draw of a run is a pure function of the seed and of what it is for.

There is no global generator anywhere: the order in which work happens cannot change what is drawn.
"""

from __future__ import annotations

import hashlib


def stream_key(seed: int, purpose: str, *parts: str | int) -> int:
    """Unsigned 64-bit key of a stream, e.g. `stream_key(7, "sample", "addition/17", visit, sample, turn)`.

    BLAKE2b over the unambiguous joining of its arguments: equal arguments give equal keys on every machine.
    """
    text = "\x1f".join([str(seed), purpose, *(f"{type(part).__name__}:{part}" for part in parts)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
