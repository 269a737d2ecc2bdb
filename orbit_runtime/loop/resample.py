"""Dynamic sampling: replaces uninformative groups by groups of further prompts, up to a bound.

Belongs here: when more prompts are drawn, and what is reported. Does not belong here: sampling (`collector`), which
groups train (`advantages`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from orbit_runtime.algorithms.advantages import is_informative
from orbit_runtime.data.samples import split_cohorts
from orbit_runtime.loop.collect import MAX_STOPPED, Collected
from orbit_runtime.types import Group, Prompt, Sample


def collect_informative(
    collected: Collected,
    collect: Callable[[Sequence[Prompt], int], Collected],
    take: Callable[[int], Sequence[Prompt]],
    *,
    max_rounds: int,
    extra: int = 0,
) -> Collected:
    """Collects one further prompt for each group that taught nothing, at most `max_rounds` times.

    Args:
        collect: returns the first groups of these prompts to end, as many as the second argument says.
        extra: prompts that each round draws in addition.

    All sampled groups are returned, including those that teach nothing: they are recorded and counted like any other
    (DAPO, arXiv:2503.14476 section 3.2). Ends early if no prompts are left.
    """
    wanted = len(collected.groups_P)
    for _ in range(max_rounds):
        missing = wanted - sum(map(teaches, collected.groups_P))
        further_P = take(missing + extra) if missing else ()
        if not further_P:
            break
        collected = _joined(collected, collect(further_P, missing))
    return collected


def teaches(group: Group) -> bool:
    """Whether two of its rollouts that are compared have different rewards."""
    return any(is_informative([each.reward for each in cohort.rollouts_G]) for cohort in split_cohorts(group))


def _joined(one: Collected, other: Collected) -> Collected:
    return replace(
        other,
        groups_P=(*one.groups_P, *other.groups_P),
        reasons=tuple(dict.fromkeys((*one.reasons, *other.reasons))),
        seconds_collect=one.seconds_collect + other.seconds_collect,
        seconds_score=one.seconds_score + other.seconds_score,
        prompts_cancelled=one.prompts_cancelled + other.prompts_cancelled,
        tokens_cancelled=one.tokens_cancelled + other.tokens_cancelled,
        stopped=(*one.stopped, *other.stopped)[:MAX_STOPPED],
    )


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """Counts over a step: all sampled groups, and those that teach nothing."""

    groups: int
    equal: int
    """Groups with two rewards or more, all those that are compared with each other equal."""
    masked: int
    """Groups without a rollout to train on: each timed out, crashed or is empty."""


def count_groups(groups_P: Sequence[Group]) -> GroupCounts:
    masked = sum(not any(rollout.trains for rollout in group.rollouts_G) for group in groups_P)
    scored = (sum(each.reward is not None for each in group.rollouts_G) for group in groups_P)
    equal = sum(count > 1 and not teaches(group) for count, group in zip(scored, groups_P, strict=True))
    return GroupCounts(len(groups_P), equal, masked)


def what_is_missing(groups_P: Sequence[Group], samples_D: Sequence[Sample], *, wanted: int, max_rounds: int) -> str:
    """A message for a step that has less to learn from than it should; empty for any other."""
    counts = count_groups(groups_P)
    seen = f"of {counts.groups} groups {counts.equal} have equal rewards, {counts.masked} no rollout that trains"
    if not any(any(sample.columns["advantage"]) for sample in samples_D):
        return f"nothing to learn from: every advantage is 0; {seen}"
    found = sum(map(teaches, groups_P))
    if max_rounds and found < wanted:
        return f"dynamic sampling gave up after {max_rounds} rounds with {found} groups of {wanted}; {seen}"
    return ""
