"""Turns a step's groups into the samples it trains on: scores what the algorithm needs, then computes advantages.

Belongs here: what an algorithm is given, and how far the policy that sampled has moved from the base. Does not belong
here: the formulas (`algorithms`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import compress, islice
from statistics import fmean
from typing import Any

from orbit_runtime.algorithms.advantages import Advantage, ScoredGroup, is_informative, kl_penalties, overlong_penalty
from orbit_runtime.algorithms.table import Algorithm
from orbit_runtime.data.samples import (
    build_samples,
    count_trained,
    shortened,
    split_cohorts,
    spread,
    trained,
    with_column,
    with_end,
)
from orbit_runtime.spec.algorithm import KL
from orbit_runtime.spec.objectives import Objective
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.types import ColumnName, Group, Rollout, Sample, Trainer

DRIFT_TOKENS = 2048
"""Most tokens that a step scores again with the adapter off."""
DRIFT_SHARE = 64
"""Those are at most one in so many of the step's, but one sample at least."""
SHOWN_TOKENS = 400
"""Most tokens of the answer that a report shows token by token."""


def build_batch(spec: RunSpec, algorithm: Algorithm, trainer: Trainer, groups_P: Sequence[Group]) -> list[Sample]:
    """A sample per rollout that trains, with every column that the algorithm reads.

    Rollouts are compared within their cohorts. With dynamic sampling, those that teach nothing are left out: they count
    in no mean.
    """
    objective = spec.algorithm.objective
    groups_P = _that_teach(objective, groups_P)
    samples_D = build_samples(groups_P)
    if "reference" in algorithm.needs:
        samples_D = with_column(samples_D, "reference", trainer.column("reference", samples_D))
    if "teacher" in algorithm.needs:
        samples_D = with_column(samples_D, "teacher", _taught(trainer, samples_D, groups_P))
    in_reward = objective.kl_placement == "Reward" and spec.algorithm.kl.coefficient > 0
    penalties_PGT = (
        list(_penalties(spec.algorithm.kl, objective, samples_D, groups_P)) if in_reward else [None] * len(groups_P)
    )
    values_PGT: Sequence[list[list[float]] | None] = [None] * len(groups_P)
    critic = spec.algorithm.decided_critic
    if critic is not None:
        samples_D, values_PGT = _valued(trainer, samples_D, groups_P, bootstrap=critic.bootstrap_truncated)
    scored_P = [
        ScoredGroup(
            [shaped_reward(spec, objective, each) for each in group.rollouts_G],
            [count_trained(each.loss_mask_T) for each in group.rollouts_G],
            penalties_GT,
            values_GT,
        )
        for group, penalties_GT, values_GT in zip(groups_P, penalties_PGT, values_PGT, strict=True)
    ]
    if algorithm.returns is not None:
        samples_D = _with_numbers(samples_D, "return", groups_P, algorithm.returns(scored_P))
    return with_shown(_with_numbers(samples_D, "advantage", groups_P, algorithm.advantages(scored_P)))


def with_shown(samples_D: Sequence[Sample]) -> list[Sample]:
    """The samples, with a mark on the one of the largest mean advantage in the first group that teaches."""
    first = next((each.prompt_number for each in samples_D if any(each.columns["advantage"])), None)
    shown = max(
        (each for each in samples_D if each.prompt_number == first),
        key=lambda each: abs(sum(each.columns["advantage"])) / count_trained(each.loss_mask_T),
        default=None,
    )
    return [replace(each, is_shown=True) if each is shown else each for each in samples_D]


def measure_drift(spec: RunSpec, trainer: Trainer, samples_D: Sequence[Sample]) -> float | None:
    """Mean KL, per token of a few of the step's samples, of the policy that sampled them from the base.

    The base is scored for it, unless the algorithm has scored it already. None without a base or without a sample.
    """
    if not samples_D or spec.adapter.type == "Full":
        return None
    prefixes = {each.prefix_id: each.prefix_length for each in samples_D}
    passed = sum(prefixes.values()) + sum(len(each.token_ids_T) - each.prefix_length for each in samples_D)
    longest = max(len(each.token_ids_T) for each in samples_D)
    count = max(1, min(DRIFT_TOKENS, passed // DRIFT_SHARE) // longest)
    few_D = [shortened(each, DRIFT_TOKENS) for each in samples_D[:: -(-len(samples_D) // count)]]
    if "reference" in few_D[0].columns:
        references_D = [each.columns["reference"] for each in few_D]
    else:
        references_D = trainer.column("base", [replace(each, columns={}) for each in few_D])
    return fmean(
        distance
        for each, reference_T in zip(few_D, references_D, strict=True)
        for distance in kl_penalties(
            *(trained(column, each.loss_mask_T) for column in (each.columns["sampled"], reference_T)),
            coefficient=1.0,
            estimator="K3",
        )
    )


def _taught(trainer: Trainer, samples_D: Sequence[Sample], groups_P: Sequence[Group]) -> Sequence[array[float]]:
    """The teacher's log-probs: from the rollouts if servers were asked as these ended, else from the trainer."""
    told_D = [each.teacher_logprobs_T for group in groups_P for each in group.rollouts_G if each.trains]
    found_D = [each for each in told_D if each is not None]
    # Also where no rollout trains: then there is nobody to ask, and a trainer without a teacher is not.
    if len(found_D) == len(samples_D):
        return found_D
    assert not found_D, "a teacher is asked about all rollouts of a run, or about none"
    return trainer.column("teacher", samples_D)


def _that_teach(objective: Objective, groups_P: Sequence[Group]) -> Sequence[Group]:
    """The rollouts that are compared with each other, as groups of their own."""
    cohorts_P = [cohort for group in groups_P for cohort in split_cohorts(group)]
    if not objective.max_rounds:
        return cohorts_P
    return [group for group in cohorts_P if is_informative([each.reward for each in group.rollouts_G])]


def describe_training(
    objective: Objective,
    groups_P: Sequence[Group],
    samples_D: Sequence[Sample],
    entropies_T: Sequence[float],
    text_of: Callable[[int], str],
) -> dict[tuple[str, int, int], dict[str, Any]]:
    """How each rollout trains, for people: its mean `advantage` over its tokens; of the one that is shown
    also each of its first `tokens` with text, log-prob, advantage, policy version and entropy.

    Args:
        samples_D: what `build_batch` made of the groups.
        entropies_T: see `UpdateResult`.
    Returns: by prompt, visit and sample.
    """
    rollouts_D = [
        ((group.prompt.prompt_id, group.prompt.visit, rollout.sample_index), rollout)
        for group in _that_teach(objective, groups_P)
        for rollout in group.rollouts_G
        if rollout.trains
    ]
    told: dict[tuple[str, int, int], dict[str, Any]] = {}
    for (key, rollout), sample in zip(rollouts_D, samples_D, strict=True):
        advantages = trained(sample.columns["advantage"], sample.loss_mask_T)
        told[key] = {"advantage": sum(advantages) / len(advantages)}
        if sample.is_shown:
            columns = (rollout.token_ids_T, rollout.logprobs_T, rollout.versions_T)
            of_T = (*(compress(column, rollout.loss_mask_T) for column in columns), advantages, entropies_T)
            told[key]["tokens"] = [
                [text_of(token), round(logprob, 4), round(advantage, 4), version, round(entropy, 4)]
                for token, logprob, version, advantage, entropy in islice(zip(*of_T, strict=True), SHOWN_TOKENS)
            ]
    return told


def _with_numbers(
    samples_D: Sequence[Sample],
    name: ColumnName,
    groups_P: Sequence[Group],
    numbers_PG: Sequence[Sequence[Advantage]],
) -> list[Sample]:
    numbers_D = [
        number
        for group, numbers_G in zip(groups_P, numbers_PG, strict=True)
        for rollout, number in zip(group.rollouts_G, numbers_G, strict=True)
        if rollout.trains
    ]
    return with_column(
        samples_D, name, [spread(each, s.loss_mask_T) for each, s in zip(numbers_D, samples_D, strict=True)]
    )


def _valued(
    trainer: Trainer, samples_D: Sequence[Sample], groups_P: Sequence[Group], *, bootstrap: bool
) -> tuple[list[Sample], list[list[list[float]]]]:
    """Samples with the column `value`, and each rollout's values for its advantages; none where it does not train."""
    rollouts_D = [each for group in groups_P for each in group.rollouts_G if each.trains]
    asked_D = [
        with_end(sample) if bootstrap and rollout.finish_reason != "stop" else sample
        for sample, rollout in zip(samples_D, rollouts_D, strict=True)
    ]
    columns_D = trainer.column("value", asked_D)
    read = iter([
        list(trained(column, sample.loss_mask_T)) for column, sample in zip(columns_D, asked_D, strict=True)
    ])  # fmt: skip
    values_PGT = [[next(read) if each.trains else [] for each in group.rollouts_G] for group in groups_P]
    own_D = [column[: len(sample.token_ids_T)] for column, sample in zip(columns_D, samples_D, strict=True)]
    return with_column(samples_D, "value", own_D), values_PGT


def shaped_reward(spec: RunSpec, objective: Objective, rollout: Rollout) -> float | None:
    """The value of a rollout before the penalty for its distance from the reference."""
    if rollout.reward is None or objective.overlong_penalty == 0:
        return rollout.reward
    return rollout.reward - overlong_penalty(
        count_trained(rollout.loss_mask_T),
        longest=spec.new_tokens,
        buffer_share=spec.algorithm.overlong.buffer_share,
        penalty=objective.overlong_penalty,
    )


def _penalties(
    kl: KL, objective: Objective, samples_D: Sequence[Sample], groups_P: Sequence[Group]
) -> Iterator[list[list[float]]]:
    """The penalty of each trained token of each rollout; 0 where it does not train."""
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
