"""A rank of the trainer that counts what it gives to other ranks.

Belongs here: counting calls and bytes of collectives, in the rank's process. Does not belong here: what is done with
the numbers (`ranks_step`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d

GIVEN = {
    "all_gather": 1, "all_gather_into_tensor": 1, "all_reduce": 0, "all_to_all_single": 1, "broadcast": 0, "isend": 0,
    "reduce": 0, "reduce_scatter": 1, "reduce_scatter_tensor": 1, "send": 0,
}  # fmt: skip
"""Collective → which argument holds what this rank contributes."""
counts: dict[str, list[int]] = {}
"""Collective → calls, bytes."""
_depth = 0


def _bytes(given: object) -> int:
    if isinstance(given, torch.Tensor):
        return given.numel() * given.element_size()
    return sum(map(_bytes, given)) if isinstance(given, Sequence) else 0


def _counted(name: str, place: int) -> Callable[..., Any]:
    collective = getattr(distributed_c10d, name)

    @wraps(collective)
    def count(*arguments: Any, **named: Any) -> Any:
        global _depth
        if not _depth:
            # One that another calls is not counted twice.
            call = counts.setdefault(name, [0, 0])
            given = arguments[place] if place < len(arguments) else named.get("input", named.get("tensor"))
            call[0] += 1
            call[1] += _bytes(given)
        _depth += 1
        try:
            return collective(*arguments, **named)
        finally:
            _depth -= 1

    return count


# Before Megatron-Core is imported, which keeps some of them under names of its own.
for _name, _place in GIVEN.items():
    _function = _counted(_name, _place)
    setattr(distributed_c10d, _name, _function)
    setattr(distributed, _name, _function)

from orbit_runtime.training.megatron.rank import MegatronRank  # noqa: E402


class CountedRank(MegatronRank):
    def taken_counts(self) -> dict[str, list[int]]:
        """Calls and bytes of each collective since this was asked last."""
        found = {name: list(each) for name, each in counts.items()}
        counts.clear()
        return found
