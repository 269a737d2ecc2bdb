"""Gradients and sums over ranks.

Belongs here: reducing gradients over ranks, their norm, and sums of a step. Does not belong here: passes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, distributed, nn

from orbit_runtime.adapters.masters import Place
from orbit_runtime.training.megatron.groups import Groups


class RankGradients:
    """Gradients of one rank's masters. Every rank calls every method, in the same order."""

    def __init__(self, groups: Groups, places: Mapping[str, Place]) -> None:
        self._groups = groups
        self._places = places

    def finish(self, masters: Mapping[str, nn.Parameter]) -> None:
        """Reduces this rank's partial gradients to complete ones, one parameter after another."""
        groups = self._groups
        for name, master in masters.items():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            place = self._places[name]
            if place.part.group == "expert":
                if place.is_whole:
                    self._sum(master.grad, groups.expert)
                self._sum(master.grad, groups.expert_replicas)
            else:
                if place.is_whole and place.part.group == "tensor":
                    self._sum(master.grad, groups.tensor)
                self._sum(master.grad, groups.replicas)

    def norm(self, masters: Mapping[str, nn.Parameter]) -> Tensor:
        """The norm over the parameters of all ranks, each counted once."""
        device = next(iter(masters.values())).device
        squares = {kind: torch.zeros((), device=device) for kind in ("whole", "tensor", "expert")}
        for name, master in masters.items():
            place = self._places[name]
            assert master.grad is not None
            squares["whole" if place.is_whole else place.part.group] += master.grad.float().square().sum()
        self._sum(squares["tensor"], self._groups.tensor)
        self._sum(squares["expert"], self._groups.expert)
        total = squares["whole"] + squares["tensor"] + squares["expert"]
        self._sum(total, self._groups.pipeline)
        return total.sqrt()

    @staticmethod
    def _sum(tensor: Tensor, group: distributed.ProcessGroup) -> None:
        if group.size() > 1:
            distributed.all_reduce(tensor, group=group)
