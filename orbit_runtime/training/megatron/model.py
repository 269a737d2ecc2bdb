"""A rank's part of a model: a `Policy` whose passes all ranks of the replica compute together.

Every rank of a replica gets the same tokens, and all ranks of its last stage get the same log-probs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.errors import UnsupportedError
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.training.megatron.groups import Groups
from orbit_runtime.training.megatron.pipeline import Pipeline
from orbit_runtime.training.megatron.regions import Regions


@dataclass(frozen=True)
class RankPolicy:
    """A rank's part, and its pipeline; None if there is one stage."""

    policy: Policy
    pipeline: Pipeline | None


def load_rank_policy(folder: Path, adapter: AdapterConfig, groups: Groups, **settings: Any) -> RankPolicy:
    """
    Args:
        settings: further arguments of `load_policy`.

    Raises:
        UnsupportedError: this model cannot be divided this way.
    """
    policy = load_policy(folder, adapter, share=groups.share(), **settings)
    if groups.sizes.world > 1 and policy.mode.decode != "pages":
        raise UnsupportedError(
            f"the attention of {type(policy.model).__name__} is not divided among GPUs: it keeps a state of its own",
            where="spec.training.trainer",
            fix="write Torch",
        )
    pipeline = None
    if groups.pipeline.size() > 1:
        hidden_size = int(policy.model.config.hidden_size)  # type: ignore[union-attr,arg-type]
        pipeline = Pipeline(groups, hidden_size, policy.device)
    regions = Regions(groups, pipeline)
    regions.install(policy.model)
    if policy.routing is not None:
        policy.routing.meet, policy.routing.own = regions.meet, regions.own
    return RankPolicy(replace(policy, division=regions), pipeline)
