"""Watches the operations of a pass for sums whose order nobody fixed.

Belongs here: what is looked for. Does not belong here: the passes (`test_determinism`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ADDING = {
    "index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_reduce",
    "index_reduce_",
}  # fmt: skip
"""Argument 1 is the dimension, argument 2 the index."""
PUTTING = {"index_put", "index_put_", "_index_put_impl", "_index_put_impl_", "_unsafe_index_put"}
"""Argument 1 is a list of indexes; with `accumulate` they add: on a CPU as threads arrive, on CUDA in sorted order."""


class RepeatedSums(TorchDispatchMode):
    """Within it, `found` names every operation that added to one place more than once, the backward pass's included.

    With repeated places such an operation adds in the order in which threads or blocks arrive, on one kind of device at
    least; without, there is nothing to order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.operations: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        self.operations.add(name)
        if (name in ADDING and _repeats_along(*args[1:3])) or (
            name in PUTTING and not args[0].is_cuda and _accumulates(func, args, kwargs) and _repeats(args[1])
        ):
            self.found.append(name)
        return func(*args, **kwargs)


def _accumulates(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("accumulate", False))


def _repeats(indexes: Sequence[torch.Tensor | None]) -> bool:
    given = [each.nonzero()[:, 0] if each.dtype is torch.bool else each for each in indexes if each is not None]
    places = torch.stack([each.reshape(-1) for each in torch.broadcast_tensors(*given)])
    return places.unique(dim=1).shape[1] < places.shape[1]


def _repeats_along(dim: int, index: torch.Tensor) -> bool:
    # `index_add` takes a vector along `dim`, `scatter_add` an index for each cell.
    lines = index.reshape(1, -1) if index.ndim < 2 else index.movedim(dim, -1).flatten(0, -2)
    ordered = lines.sort(dim=1).values
    return bool((ordered[:, 1:] == ordered[:, :-1]).any())
