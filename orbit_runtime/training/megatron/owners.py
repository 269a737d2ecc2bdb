"""Chooses, among the ranks that hold a parameter, the one that updates it: only it has the complete gradient and the
moments.

This is stage 1 of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054), by whole parameters: an update is computed on the
tensors it would be computed on anyway, so its bits do not depend on how parameters are dealt to owners.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

from orbit_runtime.adapters.masters import MasterPlace
from orbit_runtime.training.megatron.groups import Groups
from orbit_runtime.training.passes import squared_norm


@dataclass(frozen=True, slots=True)
class _Level:
    """Ranks of a group hold the same values of a parameter."""

    group: ProcessGroup
    sums: bool
    """Whether each has a share of the gradient; otherwise each has the gradient."""


class Owners:
    """One rank's view. Every rank calls every method, in the same order."""

    def __init__(self, groups: Groups, masters: Mapping[str, nn.Parameter], places: Mapping[str, MasterPlace]) -> None:
        """Args: masters: the parameters that this rank holds, whole or in part; ranks that hold the same ones agree on
        their names and sizes."""
        self._masters = masters
        self._levels = {name: _levels(groups, places[name]) for name in masters}
        self._owner = dict(self._deal())
        self.owned: Mapping[str, nn.Parameter] = {
            name: master
            for name, master in masters.items()
            if all(
                level.group.rank() == rank for level, rank in zip(self._levels[name], self._owner[name], strict=True)
            )
        }
        """The parameters that this rank updates. Every value of an adapter is in those of exactly one rank."""

    @property
    def copied(self) -> Mapping[str, nn.Parameter]:
        """The parameters of this rank whose values other ranks hold too."""
        return {
            name: master
            for name, master in self._masters.items()
            if any(level.group.size() > 1 for level in self._levels[name])
        }

    def _deal(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Each parameter's owner, as ranks within its levels' groups: largest parameters first, each to the rank that
        has least so far.

        Parameters that the same ranks hold are dealt among themselves: only those ranks know all of them.
        """
        dealt: dict[tuple[ProcessGroup, ...], list[int]] = {}
        for name in sorted(self._masters, key=lambda name: (-self._masters[name].numel(), name)):
            groups = tuple(level.group for level in self._levels[name])
            held = dealt.setdefault(groups, [0] * math.prod(group.size() for group in groups))
            owner = min(range(len(held)), key=held.__getitem__)
            held[owner] += self._masters[name].numel()
            ranks = []
            for group in groups:
                owner, rank = divmod(owner, group.size())
                ranks.append(rank)
            yield name, tuple(ranks)

    def collect_gradients(self) -> None:
        """Completes the gradients of parameters that this rank owns; other ranks' are of no use afterwards."""
        for name, master in self._masters.items():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            for level, owner in zip(self._levels[name], self._owner[name], strict=True):
                if level.sums and level.group.size() > 1:
                    distributed.reduce(master.grad, group=level.group, group_dst=owner)
                if level.group.rank() != owner:
                    break

    def norm(self) -> Tensor:
        """The norm of the complete gradients of all parameters of all ranks."""
        square = squared_norm(self.owned.values(), next(iter(self._masters.values())).device)
        distributed.all_reduce(square)
        return square.sqrt()

    def share_values(self) -> None:
        """Sends what owners have updated to all ranks that hold it."""
        for name, master in self._masters.items():
            steps = list(zip(self._levels[name], self._owner[name], strict=True))
            # Outermost first, among the ranks that will be the source within theirs.
            for number, (level, owner) in reversed(list(enumerate(steps))):
                if level.group.size() > 1 and all(inner.group.rank() == rank for inner, rank in steps[:number]):
                    distributed.broadcast(master.detach(), group=level.group, group_src=owner)


def _levels(groups: Groups, place: MasterPlace) -> Sequence[_Level]:
    """Innermost first. Together their ranks are all that hold the same values of the parameter."""
    group = place.part.group
    division, copies = (
        (groups.expert, groups.expert_replicas) if group == "expert" else (groups.tensor, groups.replicas)
    )
    sums = groups.sizes.sequence_parallel if group == "tokens" else group != "none"
    inner = [_Level(division, sums)] if place.is_whole or group == "none" else []
    return [*inner, _Level(copies, sums=True)]
