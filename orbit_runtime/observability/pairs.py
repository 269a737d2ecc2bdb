"""Finds the same prompts at the start and the end of a run, for a comparison of before and after.

Belongs here: finding prompts that were asked twice, those that show a change, and the answer that represents several.
Does not belong here: reading records (`samples`).

Held-out prompts of evaluations are the same at every step. Without them, the prompts of the first step are searched for
in the rollouts of the last steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from orbit_runtime.observability.samples import File, Ranged, ShownSample, read_samples

SHOWN = 5
LAST_STEPS = 8
"""Number of last steps in which the first step's prompts are searched for."""
MOST_BYTES = 1 << 27
"""Most bytes searched of one file."""

Key = tuple[str, str]
"""Environment and prompt."""


@dataclass(frozen=True, slots=True)
class Side:
    """The answers of one policy."""

    file: File
    shown: ShownSample
    """The sample whose reward is closest to the mean."""
    mean: float
    samples: int

    @property
    def step(self) -> int:
        return self.file.step


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt at the start and the end."""

    before: Side
    after: Side

    @property
    def change(self) -> float:
        return self.after.mean - self.before.mean


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    """Some of the prompts that were asked at both ends, and the results of all."""

    held_out: bool
    """Whether the prompts are those of an evaluation; otherwise they were trained on."""
    pairs: tuple[Pair, ...]
    better: int
    worse: int
    equal: int

    @property
    def compared(self) -> int:
        return self.better + self.worse + self.equal


@dataclass(slots=True)
class _Tally:
    file: File
    rewards: list[tuple[int, float]] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return sum(reward for _, reward in self.rewards) / len(self.rewards)

    def typical(self, sign: float) -> int:
        """Index of the most typical sample: the closest to their mean, and of two that are equally close the one on the
        side of `sign`.
        """
        mean = self.mean
        return min(self.rewards, key=lambda each: (round(abs(each[1] - mean), 9), -sign * each[1], each[0]))[0]


def read_pairs(
    source: Ranged, evaluations: Sequence[File], rollouts: Sequence[File], *, count: int = SHOWN
) -> BeforeAfter | None:
    """Finds pairs; None if no prompt was asked at both ends.

    Args:
        evaluations: ordered by step, like `rollouts`.
    """
    for files, held_out in ((evaluations, True), (rollouts, False)):
        if len(files) < 2:
            continue
        before = _tally(source, files[:1])
        last = files[-1:] if held_out else files[max(1, len(files) - LAST_STEPS) :]
        after: dict[Key, _Tally] = {}
        for file in reversed(last):
            after |= _tally(source, [file], wanted=before.keys() - after.keys())
            if len(after) >= 4 * count:
                break
        if after:
            return _choose(source, before, after, count, held_out=held_out)
    return None


def with_expected(found: BeforeAfter, references: Callable[[File], Mapping[str, str]]) -> BeforeAfter:
    """The same pairs of prompts that were trained on, with what the prompts' rows expect.

    Args: references: of a step's rollouts, by prompt.
    """
    known: dict[str, Mapping[str, str]] = {}

    def told(side: Side) -> Side:
        if side.file.key not in known:
            known[side.file.key] = references(side.file)
        expected = known[side.file.key].get(side.shown.prompt_id, "")
        return replace(side, shown=replace(side.shown, expected=expected))

    return replace(found, pairs=tuple(Pair(told(pair.before), told(pair.after)) for pair in found.pairs))


def _tally(source: Ranged, files: Iterable[File], *, wanted: Iterable[Key] | None = None) -> dict[Key, _Tally]:
    found: dict[Key, _Tally] = {}
    asked = None if wanted is None else set(wanted)
    for file in files:
        for sample, _ in read_samples(source, file.key, most_bytes=MOST_BYTES):
            key = (sample.environment, sample.prompt_id)
            if sample.reward is not None and (asked is None or key in asked):
                found.setdefault(key, _Tally(file)).rewards.append((sample.sample_index, sample.reward))
    return found


def _choose(
    source: Ranged, before: Mapping[Key, _Tally], after: Mapping[Key, _Tally], count: int, *, held_out: bool
) -> BeforeAfter:
    changes = {key: tally.mean - before[key].mean for key, tally in after.items()}
    ordered = sorted(changes, key=lambda key: (-changes[key], key))
    better = [key for key in ordered if changes[key] > 0]
    worse = [key for key in reversed(ordered) if changes[key] < 0]
    equal = [key for key in ordered if changes[key] == 0]
    # The greatest improvements, and the greatest deterioration: a page that hides it would not be credible.
    chosen = [*better[: count - 1], *worse[:1]]
    chosen += [key for key in (*better[count - 1 :], *equal, *worse[1:]) if key not in chosen][: count - len(chosen)]
    sides = [
        _pick(source, {key: (tallies[key], tallies[key].typical(sign * changes[key])) for key in chosen})
        for tallies, sign in ((before, -1), (after, 1))
    ]
    pairs = tuple(Pair(sides[0][key], sides[1][key]) for key in chosen if key in sides[0] and key in sides[1])
    return BeforeAfter(held_out, pairs, len(better), len(worse), len(equal))


def _pick(source: Ranged, wanted: Mapping[Key, tuple[_Tally, int]]) -> dict[Key, Side]:
    """Reads the samples to show, in a second pass over each file that has one.

    Args: wanted: the index of each prompt's sample.
    """
    found: dict[Key, Side] = {}
    for file in dict.fromkeys(tally.file for tally, _ in wanted.values()):
        left = {(*key, index): tally for key, (tally, index) in wanted.items() if tally.file == file}
        for sample, _ in read_samples(source, file.key):
            key = (sample.environment, sample.prompt_id)
            tally = left.pop((*key, sample.sample_index), None)
            if tally is not None:
                found[key] = Side(file, sample, tally.mean, len(tally.rewards))
            if not left:
                break
    return found
