"""Evolution: evaluates, selects and mutates a population, epoch after epoch, and continues after an interruption.

Belongs here: the loop and its state. Does not belong here: what an individual is, which only the strategy knows.
"""

from __future__ import annotations

import asyncio
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from os import PathLike
from pathlib import Path
from random import Random
from typing import Any

from orbit_runtime.agents.files import save
from orbit_runtime.agents.items import awaited, check_async, check_count, check_items, check_number, num_accepted
from orbit_runtime.agents.values import decode, encode
from orbit_runtime.errors import DataError, OutputError, UsageError
from orbit_runtime.seeds import stream_key


class EvolutionPhase(StrEnum):
    """The current activity of a pipeline."""

    INIT = "init"
    EVALUATING = "evaluating"
    SELECTING = "selecting"
    MUTATING = "mutating"
    COMPLETE = "complete"


@dataclass(frozen=True)
class EvolutionConfig:
    """Length and strength of the selection."""

    epochs: int = 10
    population_size: int = 20
    """Individuals per epoch; survivors are supplemented by children up to this number."""
    selection_ratio: float = 0.5
    """Share of the population that survives an epoch."""
    mutation_rate: float = 0.1
    """Passed to the strategy's `mutate`; if that takes only an individual, the chance that a child is mutated."""
    seed: int = 0
    concurrency: int = 16
    """Most evaluations and mutations in progress at a time."""

    def __post_init__(self) -> None:
        check_count("EvolutionConfig.epochs", self.epochs)
        check_count("EvolutionConfig.population_size", self.population_size, low=2)
        check_number("EvolutionConfig.selection_ratio", self.selection_ratio, low=0, high=1, above=True)
        check_number("EvolutionConfig.mutation_rate", self.mutation_rate, low=0, high=1)
        check_count("EvolutionConfig.concurrency", self.concurrency)


class EvolutionStrategy(ABC):
    """Scores individuals, selects survivors, and makes children. All three methods are async."""

    @abstractmethod
    async def evaluate(self, individual: Any) -> float:
        """The individual's score: higher is better."""

    async def select(self, population: list[Any], scores: list[float], selection_ratio: float) -> list[Any]:
        """The survivors. The population is given best first; an override may take fewer of these arguments."""
        return population[: max(1, round(selection_ratio * len(population)))]

    @abstractmethod
    async def mutate(self, individual: Any, mutation_rate: float) -> Any:
        """A changed copy. An override may omit `mutation_rate`."""


@dataclass(frozen=True)
class EvolutionEpoch:
    """One epoch's scores."""

    epoch: int
    best_score: float
    mean_score: float
    worst_score: float


@dataclass(frozen=True)
class EvolutionResult:
    """The result of an evolution."""

    best_score: float
    """The highest of all epochs."""
    best: Any
    """The individual with the best score."""
    epochs_completed: int
    history: list[EvolutionEpoch]
    population: list[Any]
    """The population of the last epoch, best first."""


@dataclass
class _Progress:
    """Everything that a later process needs to continue."""

    population: list[Any]
    scores: list[float | None]
    """Score of each individual; None if it is not evaluated yet."""
    history: list[EvolutionEpoch] = field(default_factory=list)
    best: Any = None
    best_score: float = -math.inf
    is_counted: bool = False
    """Whether the population is that of the last epoch in `history`; otherwise it is that of the next epoch."""


class EvolutionPipeline:
    """Evaluates every individual once; survivors keep their scores.

    Args:
        checkpoint: a file that is written after each evaluation. A pipeline with the same config continues from it, and
        ignores the population given to `run`. Individuals must be JSON values.
    """

    def __init__(
        self,
        config: EvolutionConfig,
        strategy: EvolutionStrategy,
        *,
        checkpoint: str | PathLike[str] | None = None,
    ) -> None:
        if not isinstance(config, EvolutionConfig):
            raise UsageError(f"{config!r} is not an EvolutionConfig", where="config", fix="give an EvolutionConfig")
        for name in ("evaluate", "select", "mutate"):
            check_async(getattr(strategy, name, None), f"strategy.{name}")
        self.config = config
        self.strategy = strategy
        self.phase = EvolutionPhase.INIT
        self._checkpoint = checkpoint
        self._progress: _Progress | None = None

    async def run(self, population: Sequence[Any]) -> EvolutionResult:
        """Runs all epochs. After an error or a kill, another call continues with what was not evaluated yet.

        Raises:
            DataError: a population of fewer than two, or a score that is not a finite number.
        """
        progress = self._progress or self._load() or _Progress(check_items(population, "population"), [])
        if len(progress.population) < 2:
            raise DataError(
                f"a population of {len(progress.population)} leaves nothing to select from",
                where="population",
                fix="give two individuals or more",
            )
        progress.scores = progress.scores or [None] * len(progress.population)
        self._progress = progress
        while len(progress.history) < self.config.epochs:
            if progress.is_counted:
                children = await self._next(progress)
                progress.population = [individual for individual, _ in children]
                progress.scores = [score for _, score in children]
                progress.is_counted = False
                self._save(progress)
            await self._evaluate(progress)
            scores = [score for score in progress.scores if score is not None]
            mean = math.fsum(scores) / len(scores)
            progress.history.append(EvolutionEpoch(len(progress.history) + 1, scores[0], mean, scores[-1]))
            progress.is_counted = True
            self._save(progress)
        self.phase, self._progress = EvolutionPhase.COMPLETE, None
        return EvolutionResult(
            progress.best_score, progress.best, len(progress.history), progress.history, progress.population
        )

    async def _evaluate(self, progress: _Progress) -> None:
        """Fills in missing scores, and sorts the population, best first."""
        self.phase = EvolutionPhase.EVALUATING
        places = asyncio.Semaphore(self.config.concurrency)

        async def score(index: int) -> None:
            async with places:
                answer = await awaited(self.strategy.evaluate(progress.population[index]), "strategy.evaluate")
            if isinstance(answer, bool) or not isinstance(answer, int | float) or not math.isfinite(answer):
                raise DataError(
                    f"the score {answer!r} is not a finite number",
                    where=f"population[{index}]",
                    fix="let strategy.evaluate return one, or raise",
                )
            progress.scores[index] = float(answer)
            self._save(progress)

        await _together([score(index) for index, each in enumerate(progress.scores) if each is None])
        scores = [each for each in progress.scores if each is not None]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        progress.population = [progress.population[index] for index in order]
        progress.scores = [scores[index] for index in order]
        if scores[order[0]] > progress.best_score:
            progress.best_score, progress.best = scores[order[0]], progress.population[0]

    async def _next(self, progress: _Progress) -> list[tuple[Any, float | None]]:
        """Survivors with their scores, and children without."""
        self.phase = EvolutionPhase.SELECTING
        arguments: list[Any] = [list(progress.population), list(progress.scores), self.config.selection_ratio]
        taken = num_accepted(self.strategy.select, len(arguments))
        chosen = check_items(
            await awaited(self.strategy.select(*arguments[:taken]), "strategy.select"), "strategy.select"
        )
        if not chosen:
            raise DataError("nobody survived", where="strategy.select", fix="return one individual or more")
        known = list(zip(progress.population, progress.scores, strict=True))
        chosen = chosen[: self.config.population_size]
        survivors = [(each, next((score for other, score in known if other is each), None)) for each in chosen]
        self.phase = EvolutionPhase.MUTATING
        places = asyncio.Semaphore(self.config.concurrency)
        children: list[tuple[Any, float | None]] = [survivors[0]] * (self.config.population_size - len(survivors))
        takes_rate = num_accepted(self.strategy.mutate, 2) == 2

        async def mutate(index: int) -> None:
            parent, score = survivors[index % len(survivors)]
            draw = Random(stream_key(self.config.seed, "mutate", len(progress.history) - 1, index))
            if not takes_rate and draw.random() >= self.config.mutation_rate:
                children[index] = (parent, score)
                return
            given = (parent, self.config.mutation_rate) if takes_rate else (parent,)
            async with places:
                children[index] = (await awaited(self.strategy.mutate(*given), "strategy.mutate"), None)

        await _together([mutate(index) for index in range(len(children))])
        return [*survivors, *children]

    def _save(self, progress: _Progress) -> None:
        if self._checkpoint is None:
            return
        content = {
            "config": asdict(self.config),
            "population": encode(progress.population, "population"),
            "scores": progress.scores,
            "history": [asdict(each) for each in progress.history],
            "best": encode(progress.best, "best"),
            "best_score": encode(progress.best_score, "best_score"),
            "is_counted": progress.is_counted,
        }
        save(self._checkpoint, json.dumps(content))

    def _load(self) -> _Progress | None:
        if self._checkpoint is None or not Path(self._checkpoint).exists():
            return None
        where = str(self._checkpoint)
        try:
            content = json.loads(Path(self._checkpoint).read_text(encoding="utf-8"))
            history = [EvolutionEpoch(**each) for each in content["history"]]
            config = {**content["config"], "epochs": self.config.epochs, "concurrency": self.config.concurrency}
            # Files from 0.1 imply it: they kept the counted population only after the last epoch.
            is_counted = bool(content.get("is_counted", len(history) == content["config"]["epochs"]))
            progress = _Progress(
                decode(content["population"]), content["scores"], history, decode(content["best"]),
                decode(content["best_score"]), is_counted,
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise OutputError(f"not an evolution checkpoint: {error}", where=where, fix="name another file") from None
        if config != asdict(self.config):
            changed = [name for name, value in asdict(self.config).items() if config.get(name) != value]
            raise OutputError(
                f"it belongs to another config: {', '.join(changed)}",
                where=where,
                fix="name another file, or delete it",
            )
        return progress


async def _together(calls: list[Any]) -> None:
    """Awaits all calls; the first error cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(call)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
