"""Python's collector of reference cycles, at rest while a process loads what it keeps.

Belongs here: when it rests, and what it leaves alone. Does not belong here: what is loaded.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Collects nothing within, once at the end, and then leaves alone what lives, until `look_at_all_again`.

    Packages and a model are hundreds of thousands of objects that stay. The collector would walk through all of them
    each time their number has grown by a quarter, and later in the middle of steps. A block within another changes
    nothing: the outer one decides.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def look_at_all_again() -> None:
    """At the end of a run: else a cycle that holds its model would never be collected, and keep that memory."""
    gc.unfreeze()
