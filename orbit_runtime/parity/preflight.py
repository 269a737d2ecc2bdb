"""Measured before the first step: each side's difference from itself, and the difference between the two.

Belongs here: the measurement on a few real prompts, with the adapter off, at identity, random and in its current state.
Does not belong here: acting on it beyond naming the failed gate (`loop`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import chain, cycle, islice
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from orbit_runtime.adapters.buffer import publishable
from orbit_runtime.errors import GateError
from orbit_runtime.parity.statistics import Difference, ParityLimits, build_difference
from orbit_runtime.types import FLAGS, TOKENS, BatchCopy, BatchTrainer, Copy, Engine, Probe, Sample, Scored, Trainer

if TYPE_CHECKING:
    from orbit_runtime.parity.locate import Location

Ids = Sequence[int]
PROBED_SEQUENCES = 4
"""Number of sequences on which an untrained adapter is measured."""
TOKENS_TOGETHER = 2048
"""Most tokens of the sequences that are scored in one pass, each padded to the longest of them."""
GATED = {
    "base": "adapter off: the engine serves another base, or computes it otherwise",
    "identity": "adapter at identity",
    "random": "random adapter",
    "policy": "current policy",
}
"""The parts of a `Preflight` that are held to the limit, and their readable names."""


@dataclass(frozen=True)
class Preflight:
    """The measurements, and the limit of `parity_mean` that follows from them."""

    engine_floor: Difference
    """The engine against itself: the first and the longest sequence alone and in a batch with all of them, twice, and
    all after a cached prefix if it has one; or what it sampled against the same tokens scored, where that differs
    more."""
    trainer_floor: Difference
    """The trainer against itself: the whole sequence in one piece, and split into a shared prompt and a completion."""
    base: Difference
    """Trainer against engine, adapter off."""
    identity: Difference
    """Trainer against engine, with an adapter that changes nothing."""
    random: Difference
    """Trainer against engine, with an adapter that changes every layer, as a trained one will."""
    policy: Difference
    """Trainer against engine, at the current policy."""
    random_effect: float
    """mean |Δ log-prob| by which the random adapter moved the trainer from its base; 0 would measure nothing."""
    limits: ParityLimits
    """Limits of this run. That of the mean follows from the floors; the noise of the tail is too large to scale its
    limits.
    """

    @property
    def limit(self) -> float:
        """Limit of the mean."""
        return self.limits.mean

    @property
    def failures(self) -> tuple[str, ...]:
        """Every failed gate, with its numbers; a NaN fails."""
        differences: dict[str, Difference] = {name: getattr(self, name) for name in GATED}
        found = [
            f"trainer and engine differ ({GATED[name]}): {failure}"
            for name, difference in differences.items()
            for failure in self.limits.failures(
                mean=difference.mean,
                p99=difference.p99,
                k3=difference.k3,
                outside=difference.outside,
                top1=difference.top1,
                tokens=difference.tokens,
            )
        ]
        if not self.random_effect > 0:
            found.append(
                f"a random adapter moved the trainer's log-probs by {self.random_effect:.3g}: it is not applied"
            )
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        names = ("engine_floor", "trainer_floor", *GATED)
        measured: dict[str, Any] = {name: getattr(self, name).to_json() for name in names}
        verdict = {
            "limit": self.limit,
            "limits": asdict(self.limits),
            "passed": not self.failures,
            "failures": list(self.failures),
        }
        return measured | {"random_effect": self.random_effect} | verdict


@dataclass(frozen=True)
class ComparedSides:
    """What is compared."""

    engine: Engine
    trainer: Trainer
    probing: Callable[[Probe], AbstractContextManager[None]]
    """A context within which the trainer holds another adapter."""
    check: Callable[[], None] = lambda: None
    """Called between passes; what it raises ends the measurement."""


def measure_preflight(
    sides: ComparedSides,
    sequences: Sequence[Ids],
    *,
    adapter: str,
    limits: Callable[[float], ParityLimits],
    sampled: Mapping[int, Sequence[float]] = MappingProxyType({}),
    when: str = "preflight",
) -> list[Preflight]:
    """Scores whole sequences on both sides, adapter off and on. Engine and trainer are left as they were found.

    The trainer is read once; the result has one entry for each of the engine's copies.

    Args:
        sequences: token ids, at least two each; real prompts with their chat template.
        adapter: the engine's slot that holds the trainer's current values.
        limits: the limits for a floor, on which that of the mean depends.
        sampled: by the index of a sequence, log-probs with which the engine sampled the last tokens of it.
        when: prefix for the names of the untrained adapters; an engine accepts each name once.
    """
    readings = [_read_copy(sides, copy, sequences, adapter, sampled) for copy in sides.engine.copies()]
    trainer_on, trainer_off = _trainer_readings(sides, sequences)
    trainer_floor = build_difference(*_trainer_halves(sides.trainer, sequences, trainer_off))
    probed = sequences[:PROBED_SEQUENCES]
    random, random_effect = _probe(sides, probed, "random", when)
    identity, _ = _probe(sides, probed, "identity", when)
    return [
        Preflight(
            reading.floor,
            trainer_floor,
            base=build_difference(_joined(trainer_off), reading.off, (_top(trainer_off), reading.off_top)),
            identity=identity[index],
            random=random[index],
            policy=build_difference(_joined(trainer_on), reading.on, (_top(trainer_on), reading.on_top)),
            random_effect=random_effect,
            limits=limits(max(trainer_floor.mean, reading.floor.mean)),
        )
        for index, reading in enumerate(readings)
    ]


def build_sequences(
    prompts: Sequence[Ids], completions: Mapping[int, Ids], longest: int
) -> tuple[tuple[int, ...], ...]:
    """The prompts, each with its completion if it has one, and one sequence of `longest` tokens that repeats all of
    them: errors of positions, of the cache and of long sums do not show in short sequences.

    Args:
        completions: by prompt index.
    """
    whole = [(*prompt, *completions.get(index, ())) for index, prompt in enumerate(prompts)]
    return (*whole, tuple(islice(cycle(chain.from_iterable(whole)), longest)))


def check_preflight(result: Preflight, location: Location | None = None, copy: str = "") -> None:
    """Raises GateError (84) naming every side and number that failed, with layer and copy if known."""
    if result.failures:
        found = [location.verdict()] if location else []
        raise GateError(
            (f"{copy}: " if copy else "") + "; ".join([*result.failures, *found]),
            where="parity preflight",
            fix="see parity/ in the run folder; spec.parity.preflight: Report measures without stopping",
        )


@dataclass(frozen=True)
class CopyReading:
    """Log-probs of all sequences on one copy of the engine, concatenated."""

    on: list[float]
    off: list[float]
    floor: Difference
    on_top: list[int] | None
    """Most probable tokens, concatenated."""
    off_top: list[int] | None


def _read_copy(
    sides: ComparedSides, copy: Copy, sequences: Sequence[Ids], adapter: str, sampled: Mapping[int, Sequence[float]]
) -> CopyReading:
    # Their mean needs few tokens: the first sequence has a completion, and the last is the longest.
    few = sorted({0, len(sequences) - 1})
    alone = [_scored(sides, copy, [sequences[index]], [None])[0][0] for index in few]
    crowded = _scored(sides, copy, sequences, [adapter, None])
    off = [without for _, without in crowded]
    anew, cached = _cached_readings(off)
    adapted = [on for on, _ in crowded]
    floor = build_difference([*_joined(alone), *anew], [*_joined([off[index] for index in few]), *cached])
    scored = [adapted[index].logprobs_T[len(sequences[index]) - len(each) :] for index, each in sampled.items()]
    stepped = build_difference([*chain(*scored)], [*chain(*sampled.values())])
    floor = max(floor, stepped, key=attrgetter("mean"))
    return CopyReading(_joined(adapted), _joined(off), floor, _top(adapted), _top(off))


def _scored(
    sides: ComparedSides, copy: Copy, sequences: Sequence[Ids], adapters: Sequence[str | None]
) -> list[list[Scored]]:
    """Readings of each sequence, several in one batch if the copy can, and then again after a prefix if there are two
    readings."""
    found: list[list[Scored]] = []
    for some in _batches(sequences, isinstance(copy, BatchCopy)):
        sides.check()
        if isinstance(copy, BatchCopy):
            found += copy.score_together(some, adapters)
        else:
            found += [copy.score(each, adapters, len(each) // 2 if len(adapters) > 1 else None) for each in some]
    return found


def _batches(sequences: Sequence[Ids], is_together: bool) -> Iterator[list[Ids]]:
    """The sequences in their order, as many at a time as fit into one pass."""
    some: list[Ids] = []
    for each in sequences:
        if some and (not is_together or (len(some) + 1) * max(map(len, [*some, each])) > TOKENS_TOGETHER):
            yield some
            some = []
        some.append(each)
    yield some


def _probe(sides: ComparedSides, sequences: Sequence[Ids], probe: Probe, when: str) -> tuple[list[Difference], float]:
    """Trainer against each copy under an untrained adapter, and how far that adapter moved the trainer from its base.

    The engine gets the adapter as bytes, as in a publish, but it is not stored, and its slot is removed afterwards.
    """
    name, engine = f"{when}-{probe}", sides.engine
    with sides.probing(probe):
        on, off = _trainer_readings(sides, sequences)
        engine.load_adapter(name, publishable(sides.trainer, version=-1, is_kept=False))
        try:
            measured = [[each for (each,) in _scored(sides, copy, sequences, [name])] for copy in engine.copies()]
        finally:
            engine.unload_adapter(name)
    apart = [build_difference(_joined(on), _joined(each), (_top(on), _top(each))) for each in measured]
    return apart, build_difference(_joined(on), _joined(off)).mean


def _cached_readings(scored: Sequence[Scored]) -> tuple[list[float], list[float]]:
    """The second half of every sequence: scored anew, and after its first half from the engine's cache."""
    anew: list[float] = []
    behind: list[float] = []
    for whole in scored:
        if whole.cached is not None and whole.cached.tokens:
            anew += whole.logprobs_T[-len(whole.cached.logprobs_T) :]
            behind += whole.cached.logprobs_T
    return anew, behind


def _trainer_readings(sides: ComparedSides, sequences: Sequence[Ids]) -> tuple[list[Scored], list[Scored]]:
    """Readings of every sequence, with the trainer's adapter and without."""
    trainer = sides.trainer
    pairs: list[tuple[Scored, Scored]] = []
    for some in _batches(sequences, isinstance(trainer, BatchTrainer)):
        sides.check()
        pairs += trainer.score_together(some) if isinstance(trainer, BatchTrainer) else map(trainer.score, some)
    return [on for on, _ in pairs], [off for _, off in pairs]


def _trainer_halves(
    trainer: Trainer, sequences: Sequence[Ids], whole: Sequence[Scored]
) -> tuple[list[float], list[float]]:
    """The second half of every sequence, adapter off: scored in one piece, and after a shared prompt."""
    samples = []
    for index, tokens in enumerate(sequences):
        cut = len(tokens) // 2
        mask = array(FLAGS, bytes(cut) + b"\1" * (len(tokens) - cut))
        samples.append(Sample(array(TOKENS, tokens), mask, {}, index, cut))
    halves = [
        column[sample.prefix_length :]
        for column, sample in zip(trainer.column("reference", samples), samples, strict=True)
    ]
    tails = [scored.logprobs_T[-len(half) :] for scored, half in zip(whole, halves, strict=True)]
    return [value for tail in tails for value in tail], [value for half in halves for value in half]


def _joined(readings: Iterable[Scored]) -> list[float]:
    """Every token of every sequence after its first."""
    return [value for reading in readings for value in reading.logprobs_T[1:]]


def _top(readings: Iterable[Scored]) -> list[int] | None:
    """Most probable tokens at the positions of `_joined`; None if any reading has none."""
    found: list[int] = []
    for reading in readings:
        if reading.top_T is None:
            return None
        found += reading.top_T[1:]
    return found
