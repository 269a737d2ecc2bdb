"""The rollouts collected for a step: whether they may be trained on, how stale they are, and when more are collected.

Belongs here: groups in the order of their prompts, the limit on failed rewards, the bound on staleness, further prompts
in place of uninformative groups (dynamic sampling). Does not belong here: playing episodes (`collector`), when a step
may begin (`steps`), which groups train (`advantages`).

Legend: `_P` prompts, `_G` the rollouts of one prompt, `_D` samples.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from orbit_runtime.algorithms.advantages import is_informative
from orbit_runtime.data.samples import split_cohorts, with_column
from orbit_runtime.environments.episodes import FinishedEpisode
from orbit_runtime.errors import GateError, RewardsFailingError
from orbit_runtime.types import FLOATS, Group, Prompt, Rollout, Sample

MAX_STOPPED = 20
"""Stopped episodes kept as evidence for each step: they tend to have stopped in one place."""


@dataclass(frozen=True)
class EpisodeEvidence:
    """Evidence of one episode that stopped, for debugging."""

    prompt_id: str
    sample_index: int
    stage: str
    reason: str
    stack: str
    turns: tuple[tuple[str, str], ...]
    """Role and text so far."""


@dataclass(frozen=True)
class CollectedStep:
    """A step's groups, with prompts in the order they were drawn, and the cost of collecting them."""

    groups_P: tuple[Group, ...]
    reasons: tuple[str, ...]
    """The first distinct reasons of rewards that timed out or crashed."""
    seconds_collect: float
    """Seconds the loop waited for tokens."""
    seconds_score: float
    """Seconds the loop then waited for rewards, after the last token."""
    waiting: int = 0
    """Rollouts of later steps that had already ended."""
    unfinished: int = 0
    """Rollouts of later steps that had begun but not ended."""
    prompts_cancelled: int = 0
    """Prompts that the step dropped because enough others had ended."""
    tokens_cancelled: int = 0
    """Tokens that had been sampled for the dropped prompts."""
    stopped: tuple[EpisodeEvidence, ...] = ()
    """Evidence of episodes whose environment or reward gave no result in the time allowed."""


def build_groups(prompts_P: Sequence[Prompt], rollouts: Sequence[Rollout]) -> tuple[Group, ...]:
    """Args: rollouts: in the prompts' order, the same number for each prompt."""
    size = len(rollouts) // max(1, len(prompts_P))
    return tuple(
        Group(prompt, tuple(rollouts[index * size : (index + 1) * size])) for index, prompt in enumerate(prompts_P)
    )


def gather_stopped(played: Sequence[FinishedEpisode]) -> tuple[EpisodeEvidence, ...]:
    """Evidence of the first `MAX_STOPPED` episodes of a step that stopped."""
    stopped = [(each.rollout, each.stopped) for each in played if each.stopped is not None]
    return tuple(
        EpisodeEvidence(
            rollout.prompt_id, rollout.sample_index, found.stage, found.reason, found.stack,
            tuple((turn.role, turn.text) for turn in rollout.turns),
        )
        for rollout, found in stopped[:MAX_STOPPED]
    )  # fmt: skip


def check_failures(collected: CollectedStep, limit: float) -> None:
    """Raises RewardsFailingError (86) if the share of failed rewards exceeds `limit`."""
    rollouts = [rollout for group in collected.groups_P for rollout in group.rollouts_G]
    timeouts, crashes = (sum(each.outcome == outcome for each in rollouts) for outcome in ("timeout", "crash"))
    if timeouts + crashes > limit * len(rollouts):
        longer = ", or raise timeoutSeconds (of a reward) or limits.stepSeconds (of an environment)" if timeouts else ""
        raise RewardsFailingError(
            f"{timeouts + crashes} of {len(rollouts)} rollouts of this step have no reward "
            f"({crashes} crashed, {timeouts} timed out), the limit is {limit:.0%}: " + "; ".join(collected.reasons[:3]),
            where="spec.environment.failureLimit",
            fix=f"correct what the reasons name{longer}; the rollouts are kept in failures/",
        )


@dataclass(frozen=True)
class Staleness:
    """Staleness of the sampled tokens of one step, in policy versions."""

    mean: float
    max: int


def measure_staleness(groups_P: Sequence[Group], version: int) -> Staleness:
    """Args: version: version of the policy that is trained."""
    found: Counter[int] = Counter()
    for group in groups_P:
        counts = np.bincount(_versions(group.rollouts_G) + 1)[1:]
        found.update({each: int(counts[each]) for each in np.flatnonzero(counts).tolist()})
    total = found.total()
    if not total:
        return Staleness(0.0, 0)
    return Staleness(sum((version - each) * count for each, count in found.items()) / total, version - min(found))


def check_staleness(staleness: Staleness, limit: int) -> None:
    """Raises GateError (84) above the limit, which the start times of steps should rule out."""
    if staleness.max > limit:
        raise GateError(
            f"a token of this step is {staleness.max} policy versions old",
            where="spec.rollout.maxStaleness",
            fix=f"at most {limit} are allowed; this is a bug in Orbit",
        )


def with_stale(samples_D: Sequence[Sample], groups_P: Sequence[Group], version: int) -> list[Sample]:
    """The samples, with the column `stale` if any token of the step is stale."""
    # Samples lie as `build_batch` makes them: a prompt's cohorts one after the other.
    versions_D = [
        _versions([each])
        for group in groups_P
        for cohort in split_cohorts(group)
        for each in cohort.rollouts_G
        if each.trains
    ]
    stale_D = [(versions_T >= 0) & (versions_T < version) for versions_T in versions_D]
    if not any(stale_T.any() for stale_T in stale_D):
        return list(samples_D)
    return with_column(samples_D, "stale", [array(FLOATS, each.astype(np.float32).tobytes()) for each in stale_D])


def _versions(rollouts: Iterable[Rollout]) -> np.ndarray:
    """int32: the versions of all their tokens, one rollout after the other."""
    return np.frombuffer(b"".join(rollout.versions_T for rollout in rollouts), np.int32)


def collect_informative(
    collected: CollectedStep,
    collect: Callable[[Sequence[Prompt], int], CollectedStep],
    take: Callable[[int], Sequence[Prompt]],
    *,
    max_rounds: int,
    extra: int = 0,
) -> CollectedStep:
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


def _joined(one: CollectedStep, other: CollectedStep) -> CollectedStep:
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
        if {rollout.reward for group in groups_P for rollout in group.rollouts_G} == {1.0}:
            return "all rewards are 1: nothing left to learn"
        return f"nothing to learn from: every advantage is 0; {seen}"
    found = sum(map(teaches, groups_P))
    if max_rounds and found < wanted:
        return f"dynamic sampling gave up after {max_rounds} rounds with {found} groups of {wanted}; {seen}"
    return ""
