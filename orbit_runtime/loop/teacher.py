"""A run's teacher, measured before the first step.

Belongs here: whether it is worth learning from. Does not belong here: opening it (`sides.teacher`), its passes
(`training.passes`), the divergence (`algorithms.distillation`).
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from orbit_runtime.checkpoints.adapter_folder import AdapterFolder
from orbit_runtime.data.samples import build_samples
from orbit_runtime.environments.episodes import Episode, FinishedEpisode
from orbit_runtime.errors import GateError
from orbit_runtime.loop.collect import build_groups
from orbit_runtime.loop.measure import CountedTokenSource
from orbit_runtime.loop.multiplexer import OnePolicy, requesting_one
from orbit_runtime.sides.teacher import CONTENT, FIELD, teacher_digest
from orbit_runtime.types import BASE_VERSION, TEACHER_SLOT, AdapterFiles, Engine, Trainer

if TYPE_CHECKING:
    from orbit_runtime.loop.parts import Parts

PREFLIGHT_FILE = "teacher.json"
ERRORS = 2.0
"""Standard errors of the mean difference: what a teacher may seem to be worse by, by chance."""


@dataclass(frozen=True)
class TeacherComparison:
    """The same prompts, answered by teacher and policy; only those that both were scored for."""

    teacher_P: tuple[float, ...]
    """Reward of each prompt's answer."""
    student_P: tuple[float, ...]

    @property
    def teacher(self) -> float:
        return sum(self.teacher_P) / len(self.teacher_P)

    @property
    def student(self) -> float:
        return sum(self.student_P) / len(self.student_P)

    @property
    def error(self) -> float:
        """Standard error of the mean of the differences."""
        differences = [a - b for a, b in zip(self.teacher_P, self.student_P, strict=True)]
        mean = sum(differences) / len(differences)
        spread = sum((each - mean) ** 2 for each in differences) / max(1, len(differences) - 1)
        return math.sqrt(spread / len(differences))

    @property
    def is_worse(self) -> bool:
        """Whether it is worse by more than chance."""
        return self.teacher - self.student < -ERRORS * self.error

    def to_json(self) -> dict[str, Any]:
        return {
            "prompts": len(self.teacher_P),
            "teacher_reward": self.teacher,
            "student_reward": self.student,
            "difference_error": self.error,
        }


def check_teacher(parts: Parts) -> list[str]:
    """Measures a run's teacher before its first step; returns warnings. Adapters and servers only: other teachers equal
    the policy at first.

    Raises:
        GateError: (84) its log-probs are not finite, or it earns less than the policy.
    """
    teacher = parts.spec.algorithm.teacher
    if teacher is None or (parts.teacher is None and parts.served_teacher is None):
        return []
    prompts = parts.prompts.state()
    asked = parts.prompts.take(teacher.preflight_prompts)
    parts.prompts.restore(prompts)
    # One answer to each: the prompts differ more than two answers to one of them.
    episodes = [each for each in parts.environment.build_episodes(asked, 0) if each.sample_index == 0]
    policy = parts.versions.active
    played = asyncio.run(_play(parts, parts.engine, episodes, OnePolicy(policy.name, policy.version)))
    if parts.teacher is not None:
        groups = build_groups(asked, [rollout for each in played for rollout in each.rollouts])
        _check_finite(parts.trainer, build_samples(groups), groups)
    taught = _play_taught(parts, episodes)
    if taught is None:
        return [
            f"{FIELD}: the engine holds no slot for an adapter of this kind and rank, so that the teacher's answers "
            "were not compared with the policy's"
        ]
    measured = _compare(played, taught)
    if measured is None:
        return [f"{FIELD}: no prompt was scored for both teacher and policy: nothing is known of the teacher"]
    parts.store.put(PREFLIGHT_FILE, json.dumps(measured.to_json(), indent=1).encode())
    told = (
        f"on {len(measured.teacher_P)} prompts the teacher earns {measured.teacher:.3f}, the policy "
        f"{measured.student:.3f} (standard error of the difference {measured.error:.3f})"
    )
    parts.show.note(told)
    if measured.is_worse and teacher.preflight == "Enforce":
        raise GateError(
            f"{told}: there is nothing to learn from it",
            where=f"{FIELD}.{'uri' if parts.teacher else 'endpoints'}",
            fix="take a better teacher, or write preflight: Report to learn from this one all the same",
        )
    return [] if measured.teacher > measured.student else [f"{FIELD}: {told}: no better than what it is to teach"]


def _check_finite(trainer: Trainer, samples_D: Sequence[Any], groups: Sequence[Any]) -> None:
    for sample, column in zip(samples_D, trainer.column("teacher", samples_D) if samples_D else (), strict=True):
        bad = next((index for index, each in enumerate(column) if not math.isfinite(each)), None)
        if bad is not None:
            raise GateError(
                f"the teacher's log-prob of token {bad} of an answer is {column[bad]}: {sample.token_ids_T[bad]} after "
                f"{list(sample.token_ids_T[max(0, bad - 4) : bad])}",
                where=FIELD,
                fix="its values overflow on this base: take another adapter",
            )


def _compare(played: Sequence[FinishedEpisode], taught: Sequence[FinishedEpisode]) -> TeacherComparison | None:
    pairs = [
        (theirs.rollout.reward, own.rollout.reward)
        for theirs, own in zip(taught, played, strict=True)
        if theirs.rollout.reward is not None and own.rollout.reward is not None
    ]
    return TeacherComparison(*map(tuple, zip(*pairs, strict=True))) if pairs else None


# --- answers ---

TEACHER_VERSION = -2
"""Policy version of tokens that a teacher sampled in preflight; they are not trained on."""
_NAMES = count()


@runtime_checkable
class AdoptingEngine(Protocol):
    """An engine that computes with layers of ours: it can answer as what was loaded there without a publish."""

    def adopt(self, name: str, version: int) -> None:
        """Samples from that slot, until `release`: no published bytes, hence no proof."""

    def release(self, name: str) -> None: ...


def _play_taught(parts: Parts, episodes: Sequence[Episode]) -> list[FinishedEpisode] | None:
    """The teacher's answers; None: the engine cannot give them."""
    if parts.served_teacher is not None:
        return asyncio.run(_play(parts, parts.served_teacher.engine, episodes, OnePolicy(None, BASE_VERSION)))
    assert parts.teacher is not None
    slot = _enter(parts, parts.teacher)
    if slot is None:
        return None
    try:
        return asyncio.run(_play(parts, parts.engine, episodes, OnePolicy(slot, TEACHER_VERSION)))
    finally:
        _leave(parts, slot)


async def _play(parts: Parts, engine: Engine, episodes: Sequence[Episode], policy: OnePolicy) -> list[FinishedEpisode]:
    async with requesting_one(engine, policy) as asking:
        return list(
            await asyncio.gather(*(parts.environment.play(each, CountedTokenSource(asking)) for each in episodes))
        )


def _enter(parts: Parts, adapter: AdapterFolder) -> str | None:
    """The slot under which the engine answers as the teacher; None: it cannot."""
    if isinstance(parts.engine, AdoptingEngine):
        parts.engine.adopt(TEACHER_SLOT, TEACHER_VERSION)
        return TEACHER_SLOT
    own = parts.facts.adapter
    rank = own.rank if own.type == "LoRA" else own.block_size
    if adapter.base_weights is None or (adapter.type, adapter.rank) != (own.type, rank):
        return None
    name = f"teacher-{next(_NAMES)}"
    parts.engine.load_adapter(name, AdapterFiles(TEACHER_VERSION, adapter.files, teacher_digest(adapter)[CONTENT]))
    return name


def _leave(parts: Parts, slot: str) -> None:
    if isinstance(parts.engine, AdoptingEngine):
        parts.engine.release(slot)
    else:
        parts.engine.unload_adapter(slot)
