"""Results of costly products that a layer's second pass takes from its first.

A layer that is recomputed in the backward pass need not multiply by its packed weights again: the results of those
products are kept, in the order of the calls, and everything between them is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from orbit_runtime.errors import InternalError


@dataclass(eq=False)
class SavedProducts:
    """Results of one layer's pass. Freed together with their owner: the layer's part of the graph."""

    results: list[tuple[Tensor, int]] = field(default_factory=list)
    """Each with its version: a result that was overwritten later is no longer valid."""

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Within this context, `computed_once` stores its results here."""
        with _using(self, None):
            yield

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Within this context, `computed_once` returns these results, from the first on. Can be entered again."""
        with _using(self, iter(self.results)):
            yield


_now: ContextVar[tuple[SavedProducts, Iterator[tuple[Tensor, int]] | None] | None] = ContextVar(
    "saved_products", default=None
)


@contextmanager
def _using(owner: SavedProducts, results: Iterator[tuple[Tensor, int]] | None) -> Iterator[None]:
    token = _now.set((owner, results))
    try:
        yield
    finally:
        _now.reset(token)


def computed_once(compute: Callable[[], Tensor]) -> Tensor:
    """The result of `compute`; in a layer's second pass, its result from the first. Call it outside of autograd.

    Raises:
        InternalError: the second pass requests more than the first computed, or a result was overwritten.
    """
    now = _now.get()
    if now is None:
        return compute()
    owner, results = now
    if results is None:
        result = compute().detach()
        owner.results.append((result, result._version))
        return result.detach()
    found = next(results, None)
    if found is None or found[0]._version != found[1]:
        raise InternalError("a layer's second pass asks for a product that its first did not keep")
    with torch.no_grad():
        return found[0].detach()
