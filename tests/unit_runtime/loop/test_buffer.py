"""What waits to be trained on: under random interleavings, with kills, nothing is lost and nothing is there twice."""

from __future__ import annotations

from typing import Any

import pytest
import zstandard
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orbit_runtime.environments.episodes import Episode, Played
from orbit_runtime.errors import DataError
from orbit_runtime.loop.buffer import Kept, Paid, RolloutBuffer, dump_kept, load_kept
from orbit_runtime.types import Completion, FinishReason, Prompt, Rollout, RoutedExperts, Turn

PROMPTS, SAMPLES = 2, 2
Name = tuple[str, int, int]


def episodes(step: int) -> list[Episode]:
    """Three prompts, visited again and again."""
    drawn = [divmod((step - 1) * PROMPTS + place, 3) for place in range(PROMPTS)]
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


def played(episode: Episode, tokens: int) -> Played:
    rollout = Rollout(
        "run", episode.step, episode.prompt.prompt_id, episode.sample_index, (Turn("user", 0, 2, "?"),),
        [1, 2, *range(tokens)], [0, 0, *[1] * tokens], [0.0, 0.0, *[-0.1] * tokens], [-1, -1, *[3] * tokens],
        1.0, "value", {"one": 1.0}, "stop",
    )  # type: ignore[arg-type]  # fmt: skip
    return Played(rollout, ("why",) if tokens % 2 else ())


class Interleavings(RuleBasedStateMachine):
    """A run that is killed at any moment and goes on from its newest checkpoint, beside the plainest account of it."""

    @initialize()
    def start(self) -> None:
        self.buffer = RolloutBuffer()
        self.begun: dict[int, list[Episode]] = {}
        self.last = 0
        self.trained: list[tuple[int, Name]] = []
        self.paid: dict[tuple[int, int], int] = {}
        """Tokens of the one completion of each episode that has not ended."""
        self.ended: dict[tuple[int, int], Played] = {}
        self.checkpoint: tuple[bytes, int, dict[Any, Any], dict[Any, Any], list[Any]] | None = None

    def open(self) -> list[tuple[int, int]]:
        return [(step, n) for step, all_ in self.begun.items() for n in range(len(all_)) if (step, n) not in self.ended]

    @precondition(lambda self: len(self.begun) < 4)
    @rule()
    def begin(self) -> None:
        self.last += 1
        self.begun[self.last] = episodes(self.last)
        self.buffer.begin(self.last, self.begun[self.last])

    @precondition(lambda self: self.open())
    @rule(data=st.data(), more=st.integers(1, 5))
    def pay(self, data: st.DataObject, more: int) -> None:
        at = data.draw(st.sampled_from(self.open()))
        self.paid[at] = self.paid.get(at, 0) + more
        reason: FinishReason = data.draw(st.sampled_from(["abort", "stop"]))
        self.buffer.pay(*at, Paid(2**64 - 1, (1, 2), completion(self.paid[at], reason, 3)))

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        step, number = data.draw(st.sampled_from(self.open()))
        self.ended[step, number] = played(self.begun[step][number], self.paid.pop((step, number), 0))
        self.buffer.end(step, number, self.ended[step, number])

    @precondition(lambda self: self.begun and not [at for at in self.open() if at[0] == min(self.begun)])
    @rule()
    def train(self) -> None:
        step = min(self.begun)
        found = self.buffer.take(step)
        all_ = self.begun.pop(step)
        assert found == [self.ended.pop((step, number)) for number in range(len(all_))]
        self.trained += [(step, name(each)) for each in all_]

    @rule()
    def save(self) -> None:
        kept = dump_kept(self.buffer.keep())
        self.checkpoint = (kept, self.buffer.taken, {**self.paid}, {**self.ended}, [*self.trained])

    @precondition(lambda self: self.checkpoint is not None)
    @rule()
    def kill(self) -> None:
        assert self.checkpoint is not None
        kept, taken, self.paid, self.ended, self.trained = (
            each.copy() if isinstance(each, dict | list) else each for each in self.checkpoint
        )
        restored = load_kept(kept, where="checkpoint")
        assert load_kept(dump_kept(restored), where="checkpoint") == restored
        self.buffer = RolloutBuffer(taken, restored)
        self.last, self.begun = taken, {}
        # Steps begin again in their order; what was paid for is there before anything is asked for anew.
        for step in sorted({step for step, _ in [*self.paid, *self.ended]}):
            while self.last < step:
                self.begin()
        for (step, number), tokens in self.paid.items():
            paid = self.buffer.paid(step, number, 2**64 - 1)
            assert paid is not None
            assert len(paid.completion.token_ids_T) == tokens
        for (step, number), expected in self.ended.items():
            assert self.buffer.played(step, number) == expected

    @invariant()
    def holds(self) -> None:
        self.buffer.check_integrity()
        assert len(set(self.trained)) == len(self.trained)
        everyone = [name(each) for step in range(1, self.buffer.taken + 1) for each in episodes(step)]
        assert [each for _, each in self.trained] == everyone, "none is lost, none is trained twice"
        assert self.buffer.counts == (len(self.ended), len(self.open()))


Interleavings.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestInterleavings = Interleavings.TestCase


def test_a_checkpoint_of_other_prompts_is_refused() -> None:
    buffer = RolloutBuffer()
    buffer.begin(1, episodes(1))
    buffer.end(1, 0, played(episodes(1)[0], 2))
    (kept,) = buffer.keep()
    other = RolloutBuffer(0, [Kept(1, 1, kept.name, kept.played)])
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
            load_kept(data, where="checkpoints/step-000001")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda buffer: buffer._steps.update({5: []}),
        lambda buffer: setattr(buffer._steps[1][0], "name", buffer._steps[1][1].name),
        lambda buffer: buffer._steps[1][0].paid.update({1: Paid(2, (1,), completion(1, "abort", 0))}),
        lambda buffer: setattr(buffer._steps[1][0], "played", played(episodes(2)[0], 1)),
        lambda buffer: buffer._restored.update({(1, 0): None}),
    ],
    ids=["gap", "twice", "other key", "other step", "restored too late"],
)
def test_integrity_is_something_that_can_be_lost(spoil: Any) -> None:
    buffer = RolloutBuffer()
    buffer.begin(1, episodes(1))
    buffer.check_integrity()
    spoil(buffer)
    with pytest.raises(AssertionError):
        buffer.check_integrity()
