"""From a step's groups to the samples it trains on: what the algorithm needs is scored, then advantages are computed.

Belongs here: what an algorithm is given. Does not belong here: its formulas (`algorithms`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from orbit_runtime.algorithms.kl_reward import kl_penalised_rewards
from orbit_runtime.data.samples import build_samples, spread, trained, with_column
from orbit_runtime.spec.algorithm import KL
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.types import Group, Sample, Trainer

if TYPE_CHECKING:
    from orbit_runtime.algorithms.table import Algorithm


def build_batch(spec: RunSpec, algorithm: Algorithm, trainer: Trainer, groups_P: Sequence[Group]) -> list[Sample]:
    """A sample per rollout that trains, with every column that the algorithm reads."""
    samples_D = build_samples(groups_P)
    if "reference" in algorithm.needs(spec.algorithm):
        samples_D = with_column(samples_D, "reference", trainer.reference_logprobs(samples_D))
    kl = spec.algorithm.kl
    rewards_PG = (
        list(_penalised_rewards(kl, samples_D, groups_P))
        if kl.placement == "Reward" and kl.coefficient > 0
        else [[rollout.reward for rollout in group.rollouts_G] for group in groups_P]
    )
    advantages_PG = [
        algorithm.advantages(rewards_G, normalize=spec.algorithm.advantage.normalize) for rewards_G in rewards_PG
    ]
    advantages_D = [
        advantage
        for group, advantages_G in zip(groups_P, advantages_PG, strict=True)
        for rollout, advantage in zip(group.rollouts_G, advantages_G, strict=True)
        if rollout.trains
    ]
    columns_D = [spread(value, each.loss_mask_T) for value, each in zip(advantages_D, samples_D, strict=True)]
    return with_column(samples_D, "advantage", columns_D)


def _penalised_rewards(kl: KL, samples_D: Sequence[Sample], groups_P: Sequence[Group]) -> Iterator[list[float | None]]:
    """rewards_G of each group."""
    samples = iter(samples_D)
    for group in groups_P:
        of_group = [next(samples) if rollout.trains else None for rollout in group.rollouts_G]
        policy_G, reference_G = (
            [trained(each.columns[name], each.loss_mask_T) if each else () for each in of_group]
            for name in ("sampled", "reference")
        )
        yield kl_penalised_rewards(
            [rollout.reward for rollout in group.rollouts_G],
            policy_G,
            reference_G,
            coefficient=kl.coefficient,
            estimator=kl.estimator,
        )
