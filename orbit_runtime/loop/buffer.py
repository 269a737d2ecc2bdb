"""Rollouts of steps that are not trained yet: who is under way, who has ended, and every token that was paid for.

Belongs here: what a checkpoint keeps of them, and its bytes. Does not belong here: playing episodes (`collector`).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import zstandard

from orbit_runtime.data.records import rollout_from_line, rollout_to_line
from orbit_runtime.environments.episodes import Episode, Played
from orbit_runtime.errors import DataError
from orbit_runtime.types import Completion, RoutedExperts


@dataclass(frozen=True, slots=True)
class Paid:
    """A completion, or as much of one as there is, and what it was asked for."""

    key: int
    """As in `Request`: it names the turn."""
    prompt_ids_T: tuple[int, ...]
    completion: Completion


@dataclass(frozen=True, slots=True)
class Kept:
    """One episode as a checkpoint keeps it."""

    step: int
    number: int
    """Among the step's episodes, from 0."""
    name: tuple[str, int, int]
    """Prompt, visit, sample."""
    played: Played | None
    paid: tuple[Paid, ...] = ()
    """Of an episode that has not ended: it is played again from its beginning, and given these."""


@dataclass
class _Place:
    name: tuple[str, int, int]
    played: Played | None = None
    paid: dict[int, Paid] = field(default_factory=dict)


class RolloutBuffer:
    """For one thread. Steps begin one after the other and are taken in the same order, each once and whole."""

    def __init__(self, taken: int = 0, restored: Sequence[Kept] = ()) -> None:
        """
        Args:
            taken: the newest step that was trained.
            restored: what a checkpoint kept, for when those steps begin again.
        """
        self.taken = taken
        self._steps: dict[int, list[_Place]] = {}
        self._restored = {(each.step, each.number): each for each in restored if each.step > taken}

    def begin(self, step: int, episodes: Sequence[Episode]) -> None:
        """Raises DataError where a checkpoint kept rollouts of other prompts for this step."""
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
            places.append(_Place(name, kept.played, {each.key: each for each in kept.paid}))
        self._steps[step] = places

    def played(self, step: int, number: int) -> Played | None:
        return self._steps[step][number].played

    def paid(self, step: int, number: int, key: int) -> Paid | None:
        return self._steps[step][number].paid.get(key)

    def pay(self, step: int, number: int, paid: Paid) -> None:
        """Notes what the engine gave. Of one completion more each time, of the same beginning."""
        place = self._steps[step][number]
        assert place.played is None, "the episode has ended"
        place.paid[paid.key] = paid

    def end(self, step: int, number: int, played: Played) -> None:
        place = self._steps[step][number]
        assert place.played is None, "the episode has ended"
        place.played, place.paid = played, {}

    def take(self, step: int) -> list[Played]:
        """The step's rollouts, which leave: nobody can train on them again."""
        assert step == self.taken + 1, "steps are taken in order"
        found = [place.played for place in self._steps[step]]
        assert None not in found, "an episode has not ended"
        del self._steps[step]
        self.taken = step
        return [played for played in found if played is not None]

    def reopen(self, step: int) -> None:
        """The step that was taken last begins once more, with other episodes."""
        assert step == self.taken, "only the newest step can have more"
        assert not self._steps, "a later step has begun"
        self.taken = step - 1

    @property
    def counts(self) -> tuple[int, int]:
        """Episodes that have ended, and that have not."""
        places = [place for of_step in self._steps.values() for place in of_step]
        ended = sum(place.played is not None for place in places)
        return ended, len(places) - ended

    def keep(self) -> tuple[Kept, ...]:
        """Everything that is here, as it is now; the records are frozen."""
        return (
            *(
                Kept(step, number, place.name, place.played, tuple(place.paid.values()))
                for step, places in self._steps.items()
                for number, place in enumerate(places)
                if place.played is not None or place.paid
            ),
            *self._restored.values(),
        )

    def check_integrity(self) -> None:
        """Raises AssertionError for what must not be."""
        steps = list(self._steps)
        assert steps == list(range(self.taken + 1, self.taken + 1 + len(steps))), f"{steps} after {self.taken}"
        assert all(step > max([self.taken, *steps]) for step, _ in self._restored), "kept for a step that has begun"
        names = [place.name for places in self._steps.values() for place in places]
        assert len(set(names)) == len(names), "a rollout is here twice"
        for step, places in self._steps.items():
            for place in places:
                assert not (place.played and place.paid), "tokens of an episode that has ended"
                rollout = place.played.rollout if place.played else None
                assert rollout is None or rollout.step == step, f"a rollout of step {rollout and rollout.step}"
                assert rollout is None or (rollout.prompt_id, rollout.sample_index) == (place.name[0], place.name[2])
                assert all(key == paid.key for key, paid in place.paid.items())


def dump_kept(kept: Sequence[Kept]) -> bytes:
    """One JSON object a line, compressed."""
    return zstandard.ZstdCompressor(level=3).compress(b"".join(_to_line(each) + b"\n" for each in kept))


def load_kept(data: bytes, *, where: str) -> tuple[Kept, ...]:
    """Raises DataError for bytes that `dump_kept` did not write."""
    try:
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            return tuple(_from_line(line) for line in reader.read().split(b"\n") if line)
    except (zstandard.ZstdError, orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"no rollouts that a checkpoint keeps: {error}", where=where) from error


def _to_line(kept: Kept) -> bytes:
    played = kept.played
    row = {
        "step": kept.step,
        "number": kept.number,
        "name": kept.name,
        "rollout": orjson.Fragment(rollout_to_line(played.rollout)) if played else None,
        "reasons": played.reasons if played else (),
        "paid": kept.paid,
    }
    return orjson.dumps(row, default=_plain)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, array) else value.hex()


def _from_line(line: bytes) -> Kept:
    row = orjson.loads(line)
    rollout, (prompt_id, visit, sample) = row["rollout"], row["name"]
    return Kept(
        row["step"],
        row["number"],
        (prompt_id, visit, sample),
        Played(rollout_from_line(orjson.dumps(rollout)), tuple(row["reasons"])) if rollout else None,
        tuple(Paid(each["key"], tuple(each["prompt_ids_T"]), _completion(each["completion"])) for each in row["paid"]),
    )


def _completion(row: Mapping[str, Any]) -> Completion:
    routed = row["routed_experts"]
    if routed is not None:
        tokens, layers, experts = routed["shape"]
        routed = RoutedExperts((tokens, layers, experts), bytes.fromhex(routed["data"]))
    return Completion(**{**row, "routed_experts": routed})
