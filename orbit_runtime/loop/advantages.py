"""A batch's advantages, with the KL penalty in the reward where the manifest places it there.

Belongs here: what an algorithm is given. Does not belong here: its formulas (`algorithms`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from orbit_runtime.algorithms.kl_reward import kl_penalised_rewards
from orbit_runtime.data.samples import build_samples
from orbit_runtime.spec.algorithm import KL
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.types import Group, Rollout, Trainer

if TYPE_CHECKING:
    from orbit_runtime.algorithms.table import Algorithm


def compute_advantages(
    spec: RunSpec, algorithm: Algorithm, trainer: Trainer, groups_P: Sequence[Group]
) -> list[list[float]]:
    """advantages_PG: one list per group, in the order of its rollouts."""
    kl = spec.algorithm.kl
    penalised = kl.placement == "Reward" and kl.coefficient > 0
    rewards_PG = (
        _penalised_rewards(kl, trainer, groups_P)
        if penalised
        else [[rollout.reward for rollout in group.rollouts_G] for group in groups_P]
    )
    return [algorithm.advantages(rewards, normalize=spec.algorithm.advantage.normalize) for rewards in rewards_PG]


def _penalised_rewards(kl: KL, trainer: Trainer, groups_P: Sequence[Group]) -> list[list[float | None]]:
    samples = build_samples(groups_P, [[0.0] * len(group.rollouts_G) for group in groups_P])
    reference = iter(trainer.reference_logprobs(samples))
    penalised = []
    for group in groups_P:
        # `build_samples` leaves out the same rollouts: those without a reward or without a sampled token.
        pairs = [(_sampled(r), next(reference)) if _trains(r) else ((), ()) for r in group.rollouts_G]
        rewards = [rollout.reward for rollout in group.rollouts_G]
        policy, base = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        penalised.append(
            kl_penalised_rewards(rewards, policy, base, coefficient=kl.coefficient, estimator=kl.estimator)
        )
    return penalised


def _trains(rollout: Rollout) -> bool:
    return rollout.reward is not None and 1 in rollout.loss_mask_T


def _sampled(rollout: Rollout) -> tuple[float, ...]:
    return tuple(value for value, flag in zip(rollout.logprobs_T, rollout.loss_mask_T, strict=True) if flag)
