"""Rollouts of steps that are not trained yet: episodes in flight, episodes that ended, and every token paid for.

Belongs here: what a checkpoint keeps of them, and its serialisation. Does not belong here: playing episodes
(`collector`).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import orjson
import zstandard

from orbit_runtime.data.records import decompressed_lines, rollout_from_line, rollout_to_line
from orbit_runtime.environments.episodes import Episode, EpisodeTimeout, FinishedEpisode, sampled_tokens
from orbit_runtime.errors import DataError
from orbit_runtime.types import Completion, Rollout, RoutedExperts


@dataclass(frozen=True, slots=True)
class PartialCompletion:
    """A completion, whole or as far as it got, and the request that it answers."""

    key: int
    """The key of its `Request`; it identifies the turn."""
    prompt_ids_T: tuple[int, ...]
    completion: Completion


@dataclass(frozen=True, slots=True)
class EpisodeSnapshot:
    """One episode as stored in a checkpoint."""

    step: int
    number: int
    """Index among the step's episodes, from 0."""
    name: tuple[str, int, int]
    """Prompt, visit, sample."""
    played: FinishedEpisode | None
    paid: tuple[PartialCompletion, ...] = ()
    """Completions of an unfinished episode, which is replayed from its beginning and given these again."""
    cancelled: int | None = None
    """Tokens sampled for a cancelled episode and thrown away; None if it was not cancelled."""


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """A step's rollouts, and a count of what was cancelled."""

    played: tuple[FinishedEpisode, ...]
    groups: tuple[int, ...]
    """Indices of the step's prompts that these rollouts belong to, in order."""
    prompts_cancelled: int = 0
    tokens_cancelled: int = 0
    """Tokens that had been sampled for the cancelled prompts."""

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for each in self.played for rollout in each.rollouts]


@dataclass
class _Place:
    name: tuple[str, int, int]
    played: FinishedEpisode | None = None
    paid: dict[int, PartialCompletion] = field(default_factory=dict)
    is_cancelled: bool = False
    before: int = 0
    """Tokens that an earlier execution had sampled for this episode when it was cancelled."""

    @property
    def tokens(self) -> int:
        """Tokens sampled for this episode so far."""
        ended = sum(map(sampled_tokens, self.played.rollouts)) if self.played else 0
        return self.before + ended + sum(len(each.completion.token_ids_T) for each in self.paid.values())


class _Step:
    """The places of one step, grouped by prompt, and which prompts are complete."""

    def __init__(self, places: Sequence[_Place], wanted: int | None) -> None:
        """Args: wanted: number of groups that suffice; None for all."""
        self.places = places
        self.groups = [list(group) for _, group in groupby(places, key=lambda place: place.name[:2])]
        self.wanted = len(self.groups) if wanted is None else min(wanted, len(self.groups))
        self._group_of = [index for index, group in enumerate(self.groups) for _ in group]
        self._left = [sum(place.played is None for place in group) for group in self.groups]
        self.close()

    @property
    def whole(self) -> list[int]:
        """Indices of prompts whose episodes have all ended."""
        return [index for index, left in enumerate(self._left) if not left]

    def end(self, number: int) -> list[int]:
        """See `RolloutBuffer.end`."""
        group = self._group_of[number]
        self._left[group] -= 1
        return [] if self._left[group] else self.close()

    def close(self) -> list[int]:
        """Cancels all other groups once enough have ended; returns the unfinished episodes of those groups."""
        if self._left.count(0) < self.wanted:
            return []
        for left, group in zip(self._left, self.groups, strict=True):
            for place in group:
                place.is_cancelled = bool(left)
        return [number for number, place in enumerate(self.places) if place.is_cancelled and place.played is None]


class RolloutBuffer:
    """Holds the rollouts of steps in progress. Steps begin in order and are taken in order, each once and whole.

    Not thread-safe. A step may have more prompts than it trains on: the moment enough of its groups have ended, all
    its other episodes are cancelled. That choice is made once and kept; a resumed run does not make it again.
    """

    def __init__(self, taken: int = 0, restored: Sequence[EpisodeSnapshot] = ()) -> None:
        """
        Args:
            taken: the newest step that was trained.
            restored: episodes that a checkpoint kept, used when their steps begin again.
        """
        self.taken = taken
        self._steps: dict[int, _Step] = {}
        self._restored = {(each.step, each.number): each for each in restored if each.step > taken}

    def begin(self, step: int, episodes: Sequence[Episode], wanted: int | None = None) -> None:
        """
        Args:
            episodes: the episodes of each prompt must be consecutive.
            wanted: number of groups that suffice; None for all.

        Raises:
            DataError: the checkpoint kept rollouts of other prompts for this step.
        """
        assert step == max(self._steps, default=self.taken) + 1, "steps begin in order"
        places = []
        for number, episode in enumerate(episodes):
            name = (episode.prompt.prompt_id, episode.prompt.visit, episode.sample_index)
            kept = self._restored.pop((step, number), None)
            if kept is None:
                places.append(_Place(name))
                continue
            if kept.name != name:
                raise DataError(
                    f"the checkpoint keeps a rollout of {kept.name} where the prompts give {name}",
                    where=f"step {step}",
                    fix="continue with the prompts and promptsPerStep that the run began with",
                )
            paid = {each.key: each for each in kept.paid}
            places.append(_Place(name, kept.played, paid, kept.cancelled is not None, kept.cancelled or 0))
        self._steps[step] = _Step(places, wanted)

    def is_open(self, step: int, number: int) -> bool:
        """Whether this episode still has to be played to its end."""
        place = self._steps[step].places[number]
        return place.played is None and not place.is_cancelled

    def name(self, step: int, number: int) -> tuple[str, int, int]:
        return self._steps[step].places[number].name

    def is_cancelled(self, step: int, number: int) -> bool:
        return self._steps[step].places[number].is_cancelled

    def paid(self, step: int, number: int, key: int) -> PartialCompletion | None:
        return self._steps[step].places[number].paid.get(key)

    def pay(self, step: int, number: int, paid: PartialCompletion) -> None:
        """Records a completion from the engine. A later call with the same key holds more of the same completion."""
        place = self._steps[step].places[number]
        assert place.played is None, "the episode has ended"
        place.paid[paid.key] = paid

    def end(self, step: int, number: int, played: FinishedEpisode) -> list[int]:
        """Records that an episode has ended. An episode cancelled meanwhile stays cancelled.

        Returns:
            Numbers of the running episodes that this ending cancels.
        """
        place = self._steps[step].places[number]
        assert place.played is None, "the episode has ended"
        if place.is_cancelled:
            return []
        place.played, place.paid = played, {}
        return self._steps[step].end(number)

    def take(self, step: int) -> StepRollouts:
        """Removes and returns the step's rollouts, so that nothing can train on them twice."""
        assert step == self.taken + 1, "steps are taken in order"
        taken = self._steps[step]
        chosen, groups = taken.whole, taken.groups
        assert len(chosen) == taken.wanted, "an episode has not ended"
        del self._steps[step]
        self.taken = step
        return StepRollouts(
            tuple(place.played for index in chosen for place in groups[index] if place.played is not None),
            tuple(chosen),
            len(groups) - len(chosen),
            sum(place.tokens for place in taken.places if place.is_cancelled),
        )

    def reopen(self, step: int) -> None:
        """Lets the step that was taken last begin once more, with other episodes."""
        assert step == self.taken, "only the newest step can have more"
        assert not self._steps, "a later step has begun"
        self.taken = step - 1

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of ended and of unfinished episodes; cancelled ones are not counted."""
        places = [place for step in self._steps.values() for place in step.places if not place.is_cancelled]
        ended = sum(place.played is not None for place in places)
        return ended, len(places) - ended

    def keep(self) -> tuple[EpisodeSnapshot, ...]:
        """A snapshot of everything in the buffer; the records are frozen."""
        return (
            *(
                EpisodeSnapshot(step, number, place.name, None, cancelled=place.tokens)
                if place.is_cancelled
                else EpisodeSnapshot(step, number, place.name, place.played, tuple(place.paid.values()))
                for step, of_step in self._steps.items()
                for number, place in enumerate(of_step.places)
                if place.played is not None or place.paid or place.is_cancelled
            ),
            *self._restored.values(),
        )


def dump_snapshots(kept: Sequence[EpisodeSnapshot]) -> bytes:
    """Compressed JSON Lines, one object for each episode."""
    return zstandard.ZstdCompressor(level=3).compress(b"".join(_to_line(each) + b"\n" for each in kept))


def load_snapshots(data: bytes, *, where: str) -> tuple[EpisodeSnapshot, ...]:
    """Raises DataError for bytes that `dump_snapshots` did not write."""
    try:
        return tuple(_from_line(line) for line in decompressed_lines(data))
    except (zstandard.ZstdError, orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"not the rollouts of a checkpoint: {error}", where=where) from error


def _to_line(kept: EpisodeSnapshot) -> bytes:
    played = kept.played
    row = {
        "step": kept.step,
        "number": kept.number,
        "name": kept.name,
        "rollout": orjson.Fragment(rollout_to_line(played.rollout)) if played else None,
        **(
            {"others": [orjson.Fragment(rollout_to_line(each)) for each in played.others]}
            if played and played.others
            else {}
        ),
        "reasons": played.reasons if played else (),
        **({"stopped": played.stopped} if played and played.stopped else {}),
        "paid": kept.paid,
        **({} if kept.cancelled is None else {"cancelled": kept.cancelled}),
    }
    return orjson.dumps(row, default=_plain)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, array) else value.hex()


def _from_line(line: bytes) -> EpisodeSnapshot:
    row = orjson.loads(line)
    prompt_id, visit, sample = row["name"]
    return EpisodeSnapshot(
        row["step"],
        row["number"],
        (prompt_id, visit, sample),
        _played(row) if row["rollout"] else None,
        tuple(
            PartialCompletion(each["key"], tuple(each["prompt_ids_T"]), _completion(each["completion"]))
            for each in row["paid"]
        ),
        row.get("cancelled"),
    )


def _played(row: Mapping[str, Any]) -> FinishedEpisode:
    stopped = row.get("stopped")
    rollout, *others = (rollout_from_line(orjson.dumps(each)) for each in (row["rollout"], *row.get("others", ())))
    return FinishedEpisode(
        rollout, tuple(row["reasons"]), EpisodeTimeout(**stopped) if stopped else None, tuple(others)
    )


def _completion(row: Mapping[str, Any]) -> Completion:
    routed = row["routed_experts"]
    if routed is not None:
        tokens, layers, experts = routed["shape"]
        routed = RoutedExperts((tokens, layers, experts), bytes.fromhex(routed["data"]))
    return Completion(**{**row, "routed_experts": routed})
