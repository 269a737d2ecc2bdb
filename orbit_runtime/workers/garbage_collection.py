"""Pauses Python's garbage collector while a process loads objects that it keeps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses garbage collection, collects once at the end, and freezes what is alive until `unfreeze_objects`.

    Packages and a model are hundreds of thousands of objects that stay. The collector would walk all of them each time
    their number has grown by a quarter, and later in the middle of steps. A nested block has no effect.
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


def unfreeze_objects() -> None:
    """For the end of a run: otherwise a reference cycle that holds the model would never be collected."""
    gc.unfreeze()
