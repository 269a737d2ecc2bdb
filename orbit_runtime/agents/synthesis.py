"""Generates data from data: synthesisers, and a pipeline of steps that ends with filters.

Belongs here: generating and filtering items. Does not belong here: single changes (`transforms`).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from string import Formatter
from typing import Any, Self

from orbit_runtime.agents.checks import awaited, check_async, check_count, check_items, check_number
from orbit_runtime.agents.items import TrajectoryItem, item_from
from orbit_runtime.agents.near_duplicates import deduplicate
from orbit_runtime.agents.transforms import filter_by_score
from orbit_runtime.errors import UsageError
from orbit_runtime.seeds import stream_key


@dataclass(frozen=True)
class SynthesisConfig:
    """The desired result of a pipeline."""

    target_size: int = 100
    """Most items in the result: synthesisers generate what is missing."""
    min_score: float | None = None
    """Items with a smaller score, or without one, are dropped; None keeps all."""
    dedup_threshold: float | None = 0.9
    """Near-duplicates of this similarity or more are dropped (`deduplicate`); None keeps all."""

    def __post_init__(self) -> None:
        check_count("SynthesisConfig.target_size", self.target_size)
        if self.min_score is not None:
            check_number("SynthesisConfig.min_score", self.min_score, low=float("-inf"))
        if self.dedup_threshold is not None:
            check_number("SynthesisConfig.dedup_threshold", self.dedup_threshold, low=0, high=1, above=True)


@dataclass(frozen=True)
class SynthesisResult:
    """The result of a pipeline."""

    items: list[Any] = field(default_factory=list)
    """Items that passed the filters, seeds first."""
    generated_count: int = 0
    """Items that the steps added to the seeds."""
    filtered_count: int = 0
    """Items, including seeds, that were dropped for their score or as near-duplicates."""


class DataSynthesiser(ABC):
    """Makes new items."""

    @abstractmethod
    async def generate(self, count: int) -> list[Any]:
        """Generates `count` items."""


class TemplateSynthesiser(DataSynthesiser):
    """Fills templates, using each with every combination of values before repeating any, in an order set by the seed.

    Args:
        templates: texts such as `"What is {a}+{b}?"`, each the state of an item; or dicts of an item's fields, whose
            texts are filled: `{"state": "{a}+{a}=", "action": "2*{a}"}`.
        variables: name → values.
    """

    def __init__(
        self,
        templates: Sequence[str | Mapping[str, Any]],
        variables: Mapping[str, Sequence[Any]] | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self._templates = check_items(templates, "templates")
        self._variables = {name: check_items(each, f"variables.{name}") for name, each in (variables or {}).items()}
        self._seed = seed
        if not self._templates:
            raise UsageError("there are no templates", where="templates", fix="give one or more")
        self._names = [self._find_names(each, index) for index, each in enumerate(self._templates)]

    async def generate(self, count: int) -> list[Any]:
        check_count("count", count, low=0)
        combinations = [self._num_combinations(names) for names in self._names]
        total = sum(combinations)
        # Draw numbers instead of shuffling a list: the number of combinations may be astronomical.
        draw = Random(stream_key(self._seed, "templates"))
        numbers: list[int] = []
        while len(numbers) < count:
            numbers += draw.sample(range(total), min(total, count - len(numbers)))
        return [self._fill(number, combinations) for number in numbers]

    def _find_names(self, template: object, index: int) -> list[str]:
        where = f"templates[{index}]"
        texts = [template] if isinstance(template, str) else _texts(item_from(template, where))
        try:
            found = sorted({name for text in texts for _, name, _, _ in Formatter().parse(text) if name is not None})
        except ValueError as error:
            raise UsageError(f"{error}", where=where, fix="write {name}, and {{ for a brace") from None
        for name in found:
            if not self._variables.get(name):
                raise UsageError(f"the variable {name!r} has no values", where=where, fix=f"add variables[{name!r}]")
        return found

    def _num_combinations(self, names: list[str]) -> int:
        total = 1
        for name in names:
            total *= len(self._variables[name])
        return total

    def _fill(self, number: int, combinations: list[int]) -> TrajectoryItem:
        index = 0
        while number >= combinations[index]:
            number -= combinations[index]
            index += 1
        chosen: dict[str, Any] = {}
        for name in self._names[index]:
            number, place = divmod(number, len(self._variables[name]))
            chosen[name] = self._variables[name][place]
        template = self._templates[index]
        item = TrajectoryItem(template) if isinstance(template, str) else item_from(template, f"templates[{index}]")
        filled = {key: _filled(getattr(item, key), chosen) for key in ("state", "action")}
        return TrajectoryItem(**filled, reward=item.reward, metadata={**item.metadata, "variables": chosen})


Step = DataSynthesiser | Callable[[list[Any]], Any]
"""A synthesiser, which adds items; or a function, plain or async, that turns all data into new data."""


class SynthesisPipeline:
    """Passes seeds through the steps, in the order in which they were added, and then through the filters."""

    def __init__(self, config: SynthesisConfig | None = None) -> None:
        self.config = SynthesisConfig() if config is None else config
        if not isinstance(self.config, SynthesisConfig):
            raise UsageError(f"{config!r} is not a SynthesisConfig", where="config", fix="give a SynthesisConfig")
        self._steps: list[Step] = []

    def add_step(self, step: Step) -> Self:
        """Adds a step; returns the pipeline, so that calls can be chained."""
        where = f"steps[{len(self._steps)}]"
        if hasattr(step, "generate"):
            check_async(step.generate, f"{where}.generate")
        elif not callable(step):
            raise UsageError(f"{step!r} is not a step", where=where, fix="give a DataSynthesiser or a function")
        self._steps.append(step)
        return self

    async def run(self, seed_data: Iterable[Any] = ()) -> SynthesisResult:
        """Runs the steps and the filters on the seeds."""
        data = check_items(seed_data, "seed_data")
        num_seeds = len(data)
        synthesisers = sum(hasattr(step, "generate") for step in self._steps)
        for index, step in enumerate(self._steps):
            where = f"steps[{index}]"
            if isinstance(step, DataSynthesiser) or hasattr(step, "generate"):
                missing = max(0, self.config.target_size - len(data))
                share = -(-missing // synthesisers)
                synthesisers -= 1
                made = await awaited(step.generate(share), f"{where}.generate") if share else []
                data = data + check_items(made, f"{where}.generate")
            else:
                answer = step(data)
                data = check_items(await answer if inspect.isawaitable(answer) else answer, where)
        generated = max(0, len(data) - num_seeds)
        kept = data if self.config.min_score is None else filter_by_score(data, self.config.min_score)
        kept = kept if self.config.dedup_threshold is None else deduplicate(kept, self.config.dedup_threshold)
        return SynthesisResult(kept[: self.config.target_size], generated, len(data) - len(kept))


def _texts(item: TrajectoryItem) -> list[str]:
    return [each for each in (item.state, item.action) if isinstance(each, str)]


def _filled(value: Any, chosen: Mapping[str, Any]) -> Any:
    return value.format_map(chosen) if isinstance(value, str) else value
