"""From a step's groups to the samples it trains on: what the algorithm needs is scored, then advantages are computed.

Belongs here: what an algorithm is given. Does not belong here: its formulas (`algorithms`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from orbit_runtime.algorithms.advantages import ScoredGroup, is_informative
from orbit_runtime.algorithms.kl_reward import kl_penalties
from orbit_runtime.algorithms.shaping import overlong_penalty
from orbit_runtime.data.samples import build_samples, spread, trained, with_column
from orbit_runtime.spec.algorithm import KL
from orbit_runtime.spec.objectives import Objective
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.types import Group, Rollout, Sample, Trainer

if TYPE_CHECKING:
    from orbit_runtime.algorithms.table import Algorithm


def build_batch(spec: RunSpec, algorithm: Algorithm, trainer: Trainer, groups_P: Sequence[Group]) -> list[Sample]:
    """A sample per rollout that trains, with every column that the algorithm reads.

    With dynamic sampling, groups that teach nothing are left out: they count in no mean.
    """
    objective = spec.algorithm.objective
    if objective.max_rounds:
        groups_P = [group for group in groups_P if is_informative([each.reward for each in group.rollouts_G])]
    samples_D = build_samples(groups_P)
    if "reference" in algorithm.needs:
        samples_D = with_column(samples_D, "reference", trainer.reference_logprobs(samples_D))
    in_reward = objective.kl_placement == "Reward" and spec.algorithm.kl.coefficient > 0
    penalties_PGT = (
        list(_penalties(spec.algorithm.kl, objective, samples_D, groups_P)) if in_reward else [None] * len(groups_P)
    )
    scored_P = [
        ScoredGroup(
            [shaped_reward(spec, objective, each) for each in group.rollouts_G],
            [sum(each.loss_mask_T) for each in group.rollouts_G],
            penalties_GT,
        )
        for group, penalties_GT in zip(groups_P, penalties_PGT, strict=True)
    ]
    advantages_D = [
        advantage
        for group, advantages_G in zip(groups_P, algorithm.advantages(scored_P), strict=True)
        for rollout, advantage in zip(group.rollouts_G, advantages_G, strict=True)
        if rollout.trains
    ]
    columns_D = [spread(value, each.loss_mask_T) for value, each in zip(advantages_D, samples_D, strict=True)]
    return with_column(samples_D, "advantage", columns_D)


def shaped_reward(spec: RunSpec, objective: Objective, rollout: Rollout) -> float | None:
    """What a rollout is worth before it pays for its distance from the reference."""
    if rollout.reward is None or objective.overlong_penalty == 0:
        return rollout.reward
    return rollout.reward - overlong_penalty(
        sum(rollout.loss_mask_T),
        longest=spec.rollout.sampling.max_new_tokens,
        buffer_share=spec.algorithm.overlong.buffer_share,
        penalty=objective.overlong_penalty,
    )


def _penalties(
    kl: KL, objective: Objective, samples_D: Sequence[Sample], groups_P: Sequence[Group]
) -> Iterator[list[list[float]]]:
    """What each trained token of each rollout pays; nothing where it does not train."""
    samples = iter(samples_D)
    for group in groups_P:
        of_group = [next(samples) if rollout.trains else None for rollout in group.rollouts_G]
        yield [
            kl_penalties(
                *(trained(each.columns[name], each.loss_mask_T) for name in ("sampled", "reference")),
                coefficient=kl.coefficient,
                estimator=objective.kl_estimator,
            )
            if each
            else []
            for each in of_group
        ]
