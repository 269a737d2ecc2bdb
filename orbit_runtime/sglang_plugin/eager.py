"""Passes that run as Python does, instead of replaying a recorded CUDA graph.

A hook that is placed after a graph was recorded is not in it: replayed, the pass computes and no hook hears of it. So
a pass that somebody looks at is taken off the graphs. All ranks of a server do it for the same pass, since all find the
same request. On a CPU there are no graphs; not run on hardware.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

RUNNERS = ("decode_cuda_graph_runner", "prefill_cuda_graph_runner")
"""Where `ModelRunner` looks for recorded graphs (0.5.23: `_forward_raw`); None: it has none."""


@contextmanager
def without_graphs(runner: Any) -> Iterator[None]:
    """Within it, every pass of this `ModelRunner` is computed by its modules."""
    held = {name: getattr(runner, name) for name in RUNNERS if hasattr(runner, name)}
    try:
        for name in held:
            setattr(runner, name, None)
        yield
    finally:
        for name, graphs in held.items():
            setattr(runner, name, graphs)
