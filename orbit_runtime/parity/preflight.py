"""Before the first step: how far is each side from itself, and how far are the two apart?

Belongs here: the measurement on a few real prompts, adapter off and at the current policy.
Does not belong here: acting on it beyond naming the failed gate (`loop`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orbit_runtime.errors import GateError
from orbit_runtime.parity.statistics import ABSOLUTE_LIMITS, Difference, build_difference, resolve_limit
from orbit_runtime.types import Engine, Sample, Trainer


@dataclass(frozen=True)
class Preflight:
    """What was measured, and the limit of `parity_mean` that follows from it."""

    engine_floor: Difference
    """The engine against itself: alone, and in a batch with two copies."""
    trainer_floor: Difference
    """The trainer against itself: the whole sequence in one piece, and cut into a shared prompt and an answer."""
    base: Difference
    """Trainer against engine, adapter off."""
    policy: Difference
    """Trainer against engine, at the current policy."""
    limit: float

    @property
    def passed(self) -> bool:
        return self.base.mean <= self.limit and self.policy.mean <= self.limit

    def to_json(self) -> dict[str, Any]:
        names = ("engine_floor", "trainer_floor", "base", "policy")
        return {name: getattr(self, name).to_json() for name in names} | {"limit": self.limit, "passed": self.passed}


def measure_preflight(
    engine: Engine,
    trainer: Trainer,
    sequences: Sequence[Sequence[int]],
    *,
    adapter: str,
    precision: str,
    factor: float,
    absolute: float | None,
) -> Preflight:
    """Scores whole sequences on both sides, adapter off and on.

    Args:
        sequences: token ids, at least two each; real prompts with their chat template.
        absolute: limit of the mean from the manifest; `None` takes the precision's.
    """
    alone: list[float] = []
    crowded: list[float] = []
    engine_on: list[float] = []
    trainer_on: list[float] = []
    trainer_off: list[float] = []
    halved: list[float] = []
    whole: list[float] = []
    for tokens in sequences:
        alone += engine.score(tokens, [None])[0].logprobs_T[1:]
        in_batch = engine.score(tokens, [adapter, None])
        engine_on += in_batch[0].logprobs_T[1:]
        crowded += in_batch[1].logprobs_T[1:]
        on, off = trainer.score(tokens)
        trainer_on += on.logprobs_T[1:]
        trainer_off += off.logprobs_T[1:]
        cut = len(tokens) // 2
        sample = Sample(tuple(tokens), (0,) * cut + (1,) * (len(tokens) - cut), (0.0,) * len(tokens), 0.0, 0, cut)
        halved += trainer.reference_logprobs([sample])[0]
        whole += off.logprobs_T[cut:]
    trainer_floor = build_difference(whole, halved)
    engine_floor = build_difference(alone, crowded)
    floor = max(trainer_floor.mean, engine_floor.mean)
    limit = resolve_limit(floor, factor=factor, absolute=ABSOLUTE_LIMITS[precision] if absolute is None else absolute)
    return Preflight(
        engine_floor,
        trainer_floor,
        build_difference(trainer_off, alone),
        build_difference(trainer_on, engine_on),
        limit,
    )


def check_preflight(result: Preflight) -> None:
    """Raises GateError (84) naming the side and the numbers."""
    for name, difference in (("adapter off", result.base), ("current policy", result.policy)):
        if difference.mean > result.limit:
            raise GateError(
                f"trainer and engine differ by {difference.mean:.3g} per token (mean |Δ log-prob|, {name}), "
                f"the limit is {result.limit:.3g}",
                where="parity preflight",
                fix="see parity/ in the run folder; spec.parity.preflight: Report measures without stopping",
            )
