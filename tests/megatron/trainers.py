"""The trainer over ranks of a `World`.

Belongs here: asking a rank's object in another process. Does not belong here: expectations.
"""

from __future__ import annotations

from typing import Any

import torch

from orbit_runtime.training.megatron.groups import Groups
from orbit_runtime.training.megatron.rank import MegatronRank, RankSettings
from orbit_runtime.workers.ranks.group import RankGroup
from tests.megatron.ranks import World

_HERE: dict[str, MegatronRank] = {}
"""In the process of a rank: its object."""


class WorldRanks(RankGroup):
    """Ranks of a world in the place of a group's own processes."""

    def __init__(self, world: World, settings: RankSettings) -> None:
        self._world = world
        world.call(start, settings)

    def call(self, method: str, *arguments: Any, patience: float | None = None) -> list[Any]:
        return self._world.call(ask, method, *arguments)


def rank_here() -> MegatronRank:
    return _HERE["rank"]


def start(groups: Groups, settings: RankSettings) -> None:
    _HERE["rank"] = MegatronRank(settings, groups)


def device_of(groups: Groups) -> str:
    return _HERE["rank"]._passes.device.type


def ask(groups: Groups, method: str, *arguments: Any) -> Any:
    return getattr(_HERE["rank"], method)(*arguments)


def spoil(groups: Groups, rank: int, copied: bool, critic: bool = False) -> str:
    """On one rank, the last master that only this rank has, or that others have too, is off by a little.

    Args: critic: whether to take one of the critic's.

    Returns its name on that rank; empty if there is none.
    """
    made = _HERE["rank"]
    passes = made._updater.critic._passes if critic else made._passes
    levels = passes._owners._levels
    found = [key for key, held in levels.items() if any(level.group.size() > 1 for level in held) == copied]
    name = found[-1] if found else ""
    if name and torch.distributed.get_rank() == rank:
        with torch.no_grad():
            passes._owners._masters[name].view(-1)[0] += 0.5
    return name
