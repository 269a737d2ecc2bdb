"""Passes that run as Python code instead of replaying a recorded CUDA graph.

A hook installed after a graph was recorded is not part of it: the replayed pass computes without calling the hook. A
pass that must be observed therefore does not use graphs. All ranks of a server do this for the same pass, since all
find the same request. On a CPU there are no graphs; not run on hardware.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

RUNNERS = ("decode_cuda_graph_runner", "prefill_cuda_graph_runner")
"""Attributes in which `ModelRunner` keeps recorded graphs (0.5.23: `_forward_raw`); None if it has none."""


@contextmanager
def without_graphs(runner: Any) -> Iterator[None]:
    """Within this context, every pass of this `ModelRunner` is computed by its modules."""
    held = {name: getattr(runner, name) for name in RUNNERS if hasattr(runner, name)}
    try:
        for name in held:
            setattr(runner, name, None)
        yield
    finally:
        for name, graphs in held.items():
            setattr(runner, name, graphs)
