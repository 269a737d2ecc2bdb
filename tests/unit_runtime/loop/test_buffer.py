"""What waits to be trained on: under random interleavings, with kills, nothing is lost and nothing is there twice."""

from __future__ import annotations

from typing import Any

import pytest
import zstandard
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orbit_runtime.environments.episodes import Episode, FinishedEpisode
from orbit_runtime.errors import DataError
from orbit_runtime.loop.buffer import (
    EpisodeSnapshot,
    PartialCompletion,
    RolloutBuffer,
    StepRollouts,
    dump_snapshots,
    load_snapshots,
)
from orbit_runtime.types import Completion, FinishReason, Prompt, Rollout, RoutedExperts, Turn

PROMPTS, SAMPLES = 2, 2
Name = tuple[str, int, int]


def check_integrity(buffer: RolloutBuffer) -> None:
    """Raises AssertionError if an invariant is violated."""
    steps = list(buffer._steps)
    assert steps == list(range(buffer.taken + 1, buffer.taken + 1 + len(steps))), f"{steps} after {buffer.taken}"
    assert all(step > max([buffer.taken, *steps]) for step, _ in buffer._restored), "kept for a step that has begun"
    names = [place.name for of_step in buffer._steps.values() for place in of_step.places]
    assert len(set(names)) == len(names), "a rollout is here twice"
    for step, of_step in buffer._steps.items():
        cancelled = [{place.is_cancelled for place in group} for group in of_step.groups]
        assert all(len(each) == 1 for each in cancelled), "a part of a group was cancelled"
        left = [index for index, each in enumerate(cancelled) if each == {False}]
        assert len(left) in (of_step.wanted, len(cancelled)), "not as many groups are left as are wanted"
        assert len(left) == len(cancelled) or of_step.whole == left, "cancelled before enough had ended"
        for place in of_step.places:
            assert not (place.played and place.paid), "tokens of an episode that has ended"
            prompt_id, _, first = place.name
            for index, rollout in enumerate(place.played.rollouts if place.played else ()):
                assert rollout.step == step, f"a rollout of step {rollout.step}"
                assert (rollout.prompt_id, rollout.sample_index) == (prompt_id, first + index)
            assert all(key == paid.key for key, paid in place.paid.items())


def episodes(step: int, extra: int = 0) -> list[Episode]:
    """Three prompts, visited again and again."""
    count = PROMPTS + extra
    drawn = [divmod((step - 1) * count + place, 3) for place in range(count)]
    return [
        Episode(step, Prompt(f"p/{row}", visit, ({"role": "user", "content": "?"},)), sample, (1, 2))
        for visit, row in drawn
        for sample in range(SAMPLES)
    ]


def name(episode: Episode) -> Name:
    return (episode.prompt.prompt_id, episode.prompt.visit, episode.sample_index)


def completion(length: int, reason: FinishReason, version: int) -> Completion:
    routed = RoutedExperts((length, 1, 1), bytes(range(length)))
    return Completion(0, range(length), [-0.1] * length, [version] * length, reason, "é" * length, routed)  # type: ignore[arg-type]


def played(episode: Episode, tokens: int) -> FinishedEpisode:
    rollout = Rollout(
        "run", episode.step, episode.prompt.prompt_id, episode.sample_index, (Turn("user", 0, 2, "?"),),
        [1, 2, *range(tokens)], [0, 0, *[1] * tokens], [0.0, 0.0, *[-0.1] * tokens], [-1, -1, *[3] * tokens],
        1.0, "value", {"one": 1.0}, "stop",
    )  # type: ignore[arg-type]  # fmt: skip
    return FinishedEpisode(rollout, ("why",) if tokens % 2 else ())


class Interleavings(RuleBasedStateMachine):
    """A run that is killed at any moment and goes on from its newest checkpoint, beside the plainest account of it."""

    @initialize(extra=st.integers(0, 2))
    def start(self, extra: int) -> None:
        self.extra = extra
        """Prompts that each step has and does not train."""
        self.buffer = RolloutBuffer()
        self.begun: dict[int, list[Episode]] = {}
        self.last = 0
        self.trained: list[tuple[int, Name]] = []
        self.paid: dict[tuple[int, int], int] = {}
        """Tokens of the one completion of each episode that has not ended."""
        self.ended: dict[tuple[int, int], FinishedEpisode] = {}
        self.cancelled: dict[tuple[int, int], int] = {}
        """Tokens that were thrown away of each episode that its step goes on without."""
        self.checkpoint: tuple[Any, ...] | None = None

    def open(self) -> list[tuple[int, int]]:
        gone = {*self.ended, *self.cancelled}
        return [(step, n) for step, all_ in self.begun.items() for n in range(len(all_)) if (step, n) not in gone]

    def whole(self, step: int) -> list[int]:
        """Prompts of which all samples have ended."""
        return [
            prompt
            for prompt in range(PROMPTS + self.extra)
            if all((step, prompt * SAMPLES + sample) in self.ended for sample in range(SAMPLES))
        ]

    @precondition(lambda self: len(self.begun) < 4)
    @rule()
    def begin(self) -> None:
        self.last += 1
        self.begun[self.last] = episodes(self.last, self.extra)
        self.buffer.begin(self.last, self.begun[self.last], PROMPTS)

    @precondition(lambda self: self.open())
    @rule(data=st.data(), more=st.integers(1, 5))
    def pay(self, data: st.DataObject, more: int) -> None:
        at = data.draw(st.sampled_from(self.open()))
        self.paid[at] = self.paid.get(at, 0) + more
        reason: FinishReason = data.draw(st.sampled_from(["abort", "stop"]))
        self.buffer.pay(*at, PartialCompletion(2**64 - 1, (1, 2), completion(self.paid[at], reason, 3)))

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        step, number = data.draw(st.sampled_from(self.open()))
        self.ended[step, number] = played(self.begun[step][number], self.paid.pop((step, number), 0))
        told = self.buffer.end(step, number, self.ended[step, number])
        whole = self.whole(step)
        gone = (
            {n for n in range(len(self.begun[step])) if n // SAMPLES not in whole} if len(whole) == PROMPTS else set()
        )
        assert told == sorted(n for n in gone if (step, n) not in self.ended)
        for n in gone:
            ended = self.ended.pop((step, n), None)
            tokens = sum(ended.rollout.loss_mask_T) if ended else self.paid.pop((step, n), 0)
            self.cancelled[step, n] = tokens

    @precondition(lambda self: self.cancelled)
    @rule(data=st.data(), more=st.integers(0, 5))
    def tell_a_cancelled_one(self, data: st.DataObject, more: int) -> None:
        """What the engine had sampled when it was told to end comes late, or a reward does."""
        step, number = data.draw(st.sampled_from([*self.cancelled]))
        place = self.buffer._steps[step].places[number]
        if place.played is not None or place.before:
            return
        self.cancelled[step, number] += more
        if self.cancelled[step, number]:
            ended = completion(self.cancelled[step, number], "abort", 3)
            self.buffer.pay(step, number, PartialCompletion(2**64 - 1, (1, 2), ended))
        assert self.buffer.end(step, number, played(self.begun[step][number], 1)) == []

    @precondition(lambda self: self.begun and not [at for at in self.open() if at[0] == min(self.begun)])
    @rule()
    def train(self) -> None:
        step = min(self.begun)
        found, whole = self.buffer.take(step), self.whole(step)
        numbers = [prompt * SAMPLES + sample for prompt in whole for sample in range(SAMPLES)]
        all_ = self.begun.pop(step)
        gone = [self.cancelled.pop((step, n)) for n in range(len(all_)) if n not in numbers]
        ended = tuple(self.ended.pop((step, number)) for number in numbers)
        assert found == StepRollouts(ended, tuple(whole), self.extra, sum(gone))
        self.trained += [(step, name(all_[number])) for number in numbers]

    @rule()
    def save(self) -> None:
        kept = dump_snapshots(self.buffer.keep())
        state = ({**self.paid}, {**self.ended}, {**self.cancelled}, [*self.trained])
        self.checkpoint = (kept, self.buffer.taken, *state)

    @precondition(lambda self: self.checkpoint is not None)
    @rule()
    def kill(self) -> None:
        assert self.checkpoint is not None
        kept, taken, self.paid, self.ended, self.cancelled, self.trained = (
            each.copy() if isinstance(each, dict | list) else each for each in self.checkpoint
        )
        restored = load_snapshots(kept, where="checkpoint")
        assert load_snapshots(dump_snapshots(restored), where="checkpoint") == restored
        self.buffer = RolloutBuffer(taken, restored)
        self.last, self.begun = taken, {}
        # Steps begin again in their order; what was paid for is there before anything is asked for anew.
        for step in sorted({step for step, _ in [*self.paid, *self.ended, *self.cancelled]}):
            while self.last < step:
                self.begin()
        for (step, number), tokens in self.paid.items():
            paid = self.buffer.paid(step, number, 2**64 - 1)
            assert paid is not None
            assert len(paid.completion.token_ids_T) == tokens
        for (step, number), expected in self.ended.items():
            assert self.buffer._steps[step].places[number].played == expected
        for step, number in self.cancelled:
            assert not self.buffer.is_open(step, number), "what was thrown away is not played again"

    @invariant()
    def holds(self) -> None:
        check_integrity(self.buffer)
        assert len(set(self.trained)) == len(self.trained)
        for step in range(1, self.buffer.taken + 1):
            those = [each for at, each in self.trained if at == step]
            everyone = [name(each) for each in episodes(step, self.extra)]
            assert len(those) == PROMPTS * SAMPLES, "as many as a step trains, whatever else was drawn"
            assert those == [each for each in everyone if each in those], "none of another step, in the prompts' order"
            assert self.extra or those == everyone, "none is lost"
        assert {at for at, _ in self.trained} == {*range(1, self.buffer.taken + 1)}
        assert self.buffer.counts == (len(self.ended), len(self.open()))


Interleavings.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestInterleavings = Interleavings.TestCase


def test_a_checkpoint_of_other_prompts_is_refused() -> None:
    buffer = RolloutBuffer()
    buffer.begin(1, episodes(1))
    buffer.end(1, 0, played(episodes(1)[0], 2))
    (kept,) = buffer.keep()
    other = RolloutBuffer(0, [EpisodeSnapshot(1, 1, kept.name, kept.played)])
    with pytest.raises(DataError, match="the checkpoint keeps a rollout of"):
        other.begin(1, episodes(1))


def test_what_was_trained_is_not_restored() -> None:
    buffer = RolloutBuffer()
    buffer.begin(1, episodes(1))
    for number, episode in enumerate(episodes(1)):
        buffer.end(1, number, played(episode, 1))
    kept = buffer.keep()
    assert len(kept) == PROMPTS * SAMPLES
    again = RolloutBuffer(1, kept)
    again.begin(2, episodes(2))
    assert again.counts == (0, PROMPTS * SAMPLES)
    assert not again.keep()


def test_bytes_that_are_no_rollouts_are_told_as_such() -> None:
    for data in (b"nonsense", zstandard.compress(b"{}\n"), zstandard.compress(b"nonsense\n")):
        with pytest.raises(DataError, match="checkpoint"):
            load_snapshots(data, where="checkpoints/step-000001")


def place(buffer: RolloutBuffer, number: int) -> Any:
    return buffer._steps[1].places[number]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda buffer: buffer._steps.update({5: buffer._steps[1]}),
        lambda buffer: setattr(place(buffer, 0), "name", place(buffer, 1).name),
        lambda buffer: place(buffer, 0).paid.update({1: PartialCompletion(2, (1,), completion(1, "abort", 0))}),
        lambda buffer: setattr(place(buffer, 0), "played", played(episodes(2)[0], 1)),
        lambda buffer: buffer._restored.update({(1, 0): None}),
        lambda buffer: setattr(place(buffer, 0), "is_cancelled", True),
        lambda buffer: [setattr(place(buffer, number), "is_cancelled", True) for number in range(SAMPLES)],
    ],
    ids=["gap", "twice", "other key", "other step", "restored too late", "half a group", "cancelled too early"],
)
def test_integrity_is_something_that_can_be_lost(spoil: Any) -> None:
    buffer = RolloutBuffer()
    buffer.begin(1, episodes(1))
    check_integrity(buffer)
    spoil(buffer)
    with pytest.raises(AssertionError):
        check_integrity(buffer)
