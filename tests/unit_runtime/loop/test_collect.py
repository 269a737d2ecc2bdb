"""Dynamic sampling: what is drawn again, when it ends, and what is said."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from orbit_runtime.loop.collect import CollectedStep, GroupCounts, collect_informative, count_groups, what_is_missing
from orbit_runtime.types import Group, Outcome, Prompt, Rollout, Sample

OUTCOMES: tuple[Outcome, Outcome] = ("value", "crash")
MIXED, EQUAL, FAILED = (1.0, 0.0), (0.5, 0.5), (None, None)


def group(rewards: Sequence[float | None], name: str = "p") -> Group:
    rollouts = tuple(
        Rollout("r", 1, name, index, (), (5, 6), (0, 1), (0, -1), (-1, 0), reward, OUTCOMES[reward is None], {}, "stop")
        for index, reward in enumerate(rewards)
    )
    return Group(Prompt(name, 0, ()), rollouts)


class Prompts:
    """Names that are drawn one after the other, each of which has its rewards."""

    def __init__(self, *rewards: Sequence[float | None]) -> None:
        self.rewards = list(rewards)
        self.drawn = 0
        self.rounds: list[int] = []

    def take(self, count: int) -> list[Prompt]:
        first, self.drawn = self.drawn, min(self.drawn + count, len(self.rewards))
        return [Prompt(str(index), 0, ()) for index in range(first, self.drawn)]

    def collect(self, prompts_P: Sequence[Prompt], wanted: int) -> CollectedStep:
        """The last of them end first."""
        self.rounds.append(len(prompts_P))
        first_P = prompts_P[-wanted:]
        groups = tuple(group(self.rewards[int(each.prompt_id)], each.prompt_id) for each in first_P)
        lost = len(prompts_P) - len(first_P)
        return CollectedStep(groups, ("slow",), 1.0, 0.5, prompts_cancelled=lost, tokens_cancelled=7 * lost)

    def run(self, count: int, max_rounds: int, extra: int = 0) -> CollectedStep:
        first = self.collect(self.take(count + extra), count)
        return collect_informative(first, self.collect, self.take, max_rounds=max_rounds, extra=extra)


def test_as_many_are_drawn_again_as_taught_nothing_and_all_are_kept_in_order() -> None:
    prompts = Prompts(MIXED, EQUAL, FAILED, EQUAL, MIXED, MIXED, MIXED)
    found = prompts.run(3, max_rounds=10)
    assert prompts.rounds == [3, 2, 1]
    assert [each.prompt.prompt_id for each in found.groups_P] == ["0", "1", "2", "3", "4", "5"]
    assert (found.reasons, found.seconds_collect, found.seconds_score) == (("slow",), 3.0, 1.5)


@pytest.mark.parametrize(("max_rounds", "rounds"), [(0, [2]), (1, [2, 2]), (3, [2, 2, 2, 2])])
def test_it_gives_up_after_its_bound(max_rounds: int, rounds: list[int]) -> None:
    prompts = Prompts(*[EQUAL] * 20)
    prompts.run(2, max_rounds)
    assert prompts.rounds == rounds


def test_each_round_draws_more_than_it_wants_and_counts_what_it_went_on_without() -> None:
    prompts = Prompts(MIXED, MIXED, EQUAL, MIXED, EQUAL, MIXED, EQUAL, MIXED)
    found = prompts.run(2, max_rounds=10, extra=1)
    assert prompts.rounds == [3, 2, 2, 1]
    assert [each.prompt.prompt_id for each in found.groups_P] == ["1", "2", "4", "6", "7"]
    assert (found.prompts_cancelled, found.tokens_cancelled) == (3, 21)


def test_it_ends_where_no_prompts_are_left() -> None:
    prompts = Prompts(EQUAL, EQUAL, MIXED)
    assert len(prompts.run(2, max_rounds=10).groups_P) == 3
    assert prompts.rounds == [2, 1]


def sample(advantage: float) -> Sample:
    return Sample((5, 6), (0, 1), {"sampled": (0, -1), "advantage": (0, advantage)}, 0, 1)  # type: ignore[dict-item]


def test_groups_are_counted_by_what_they_teach() -> None:
    groups = [group(each) for each in (MIXED, EQUAL, FAILED, (1.0, None), (0.3, 0.3, None))]
    assert count_groups(groups) == GroupCounts(5, equal=2, masked=1)


def test_what_is_said_of_a_step() -> None:
    def said(*rewards: Sequence[float | None], advantage: float, max_rounds: int = 0) -> str:
        return what_is_missing([group(each) for each in rewards], [sample(advantage)], wanted=2, max_rounds=max_rounds)

    assert said(MIXED, MIXED, advantage=0.5) == ""
    assert said(MIXED, EQUAL, advantage=0.5) == "", "one that teaches is a step like any other"
    assert said(EQUAL, FAILED, advantage=0.0) == (
        "nothing to learn from: every advantage is 0; of 2 groups 1 have equal rewards, 1 no rollout that trains"
    )
    assert said((1.0, 1.0), (1.0,), advantage=0.0) == "all rewards are 1: nothing left to learn"
    assert said(MIXED, EQUAL, EQUAL, advantage=0.5, max_rounds=1) == (
        "dynamic sampling gave up after 1 rounds with 1 groups of 2; of 3 groups 2 have equal rewards, 0 no rollout "
        "that trains"
    )
