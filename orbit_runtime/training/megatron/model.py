"""A rank's part of a model: a `Policy` whose passes are computed by all ranks of the replica together.

Every rank of a replica is given the same tokens, and gets the same log-probs.

Belongs here: loading a part and making it a whole with the other ranks'. Does not belong here: steps (`training`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.errors import UnsupportedError
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.training.megatron.groups import Groups
from orbit_runtime.training.megatron.regions import Regions


def load_rank_policy(folder: Path, adapter: AdapterConfig, groups: Groups, **settings: Any) -> Policy:
    """
    Args:
        settings: of `load_policy`.

    Raises:
        UnsupportedError: this model cannot be divided so.
    """
    policy = load_policy(folder, adapter, share=groups.share(), **settings)
    if groups.sizes.world > 1 and not policy.packs:
        raise UnsupportedError(
            f"the attention of {type(policy.model).__name__} is not divided among GPUs: it keeps a state of its own",
            where="spec.training.trainer",
            fix="write Torch",
        )
    regions = Regions(groups)
    regions.install(policy.model)
    if policy.routing is not None:
        policy.routing.meet, policy.routing.own = regions.meet, regions.own
    return policy
