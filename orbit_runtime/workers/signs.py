"""Signs of life: when a piece of this process's work last ended, be it a decoding step or a micro-batch.

Belongs here: the time of the newest. Does not belong here: what silence means (`observability.status`), or work that
does not end (`stalls`).
"""

from __future__ import annotations

import math
import time

_newest = -math.inf


def sign() -> None:
    """Says that a piece of work has ended. From any thread, and so cheap that each decoding step can afford it."""
    global _newest
    _newest = time.monotonic()


def silent_seconds() -> float:
    """Since the newest sign; infinite if there was none."""
    return time.monotonic() - _newest
