"""Generates data from data: functions, synthesisers, and a pipeline of steps that ends with filters.

Functions take trajectory items and plain dicts, do not change their input, and use a seed for random draws.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from string import Formatter
from typing import Any, Self, overload

from orbit_runtime.agents.items import (
    TrajectoryItem,
    awaited,
    changed,
    check_async,
    check_count,
    check_items,
    check_number,
    get,
    item_from,
    pair_keys,
    score_of,
    seen_key,
)
from orbit_runtime.agents.near_duplicates import deduplicate
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


def augment_add_noise(data: Iterable[Any], noise_level: float = 0.1, *, seed: int = 0) -> list[Any]:
    """A copy of each item with noise in the state (`state`, or a dict's `input` or `prompt`).

    Texts get a misspelling in this fraction of their characters, at least one; numbers, also in lists and dicts, a
    Gaussian error of this fraction of their magnitude (of 1, if they are smaller). Action and score stay.

    Args:
        noise_level: 0 to 1; with 0 nothing changes.
    """
    check_number("noise_level", noise_level, low=0, high=1)
    noisy = []
    for index, item in enumerate(check_items(data, "data")):
        key = seen_key(item, f"data[{index}]")
        noisy.append(changed(item, **{key: _noisy(get(item, key), noise_level, Random(stream_key(seed, "n", index)))}))
    return noisy


def augment_swap_io(data: Iterable[Any]) -> list[Any]:
    """Each item with state and action exchanged; in a dict, also input and output, or prompt and completion."""
    swapped = []
    for index, item in enumerate(check_items(data, "data")):
        seen, done = pair_keys(item, f"data[{index}]")
        swapped.append(changed(item, **{seen: get(item, done), done: get(item, seen)}))
    return swapped


def filter_by_score(data: Iterable[Any], min_score: float) -> list[Any]:
    """The items whose reward (a dict's `score`, or else `reward`) is `min_score` or more; items without a score are
    dropped."""
    check_number("min_score", min_score, low=-math.inf)
    scored = [(item, score_of(item, f"data[{index}]")) for index, item in enumerate(check_items(data, "data"))]
    return [item for item, score in scored if score is not None and score >= min_score]


@overload
def split_dataset(data: Iterable[Any], ratios: Mapping[str, float], *, seed: int = 0) -> dict[str, list[Any]]: ...
@overload
def split_dataset(data: Iterable[Any], ratios: Sequence[float], *, seed: int = 0) -> tuple[list[Any], ...]: ...
def split_dataset(
    data: Iterable[Any], ratios: Sequence[float] | Mapping[str, float], *, seed: int = 0
) -> tuple[list[Any], ...] | dict[str, list[Any]]:
    """Divides the items at random, each into one part; sizes match the ratios to within one item.

    Args:
        ratios: one for each part, adding up to 1: `[0.8, 0.2]`, or with names `{"train": 0.8, "test": 0.2}`, which the
            result then has too.
    """
    items = check_items(data, "data")
    if isinstance(ratios, str) or not isinstance(ratios, Sequence | Mapping) or not ratios:
        raise UsageError(f"{ratios!r} are not ratios", where="ratios", fix="give a list such as [0.8, 0.2]")
    shares = list(ratios.values()) if isinstance(ratios, Mapping) else list(ratios)
    for index, share in enumerate(shares):
        check_number(f"ratios[{index}]", share, low=0, high=1)
    if abs(math.fsum(shares) - 1) > 1e-6:
        raise UsageError(
            f"the ratios add up to {math.fsum(shares):g}, not to 1",
            where="ratios",
            fix="change one of them: [0.8, 0.2]",
        )
    order = list(range(len(items)))
    Random(stream_key(seed, "split")).shuffle(order)
    bounds = [round(math.fsum(shares[:end]) * len(items)) for end in range(len(shares) + 1)]
    bounds[-1] = len(items)
    parts = tuple([items[index] for index in order[a:b]] for a, b in pairwise(bounds))
    return dict(zip(ratios, parts, strict=True)) if isinstance(ratios, Mapping) else parts


def _noisy(value: Any, level: float, draw: Random) -> Any:
    if level == 0 or value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return value + draw.gauss(0, level * max(1.0, abs(value))) if math.isfinite(value) else value
    if isinstance(value, str):
        return _misspelt(value, level, draw)
    if isinstance(value, list | tuple):
        return type(value)(_noisy(each, level, draw) for each in value)
    if isinstance(value, dict):
        return {key: _noisy(each, level, draw) for key, each in value.items()}
    return value


def _misspelt(text: str, level: float, draw: Random) -> str:
    """Each error drops a character, doubles it, or replaces it by another character of the text."""
    letters = list(text)
    for place in draw.sample(range(len(letters)), min(len(letters), max(1, round(level * len(letters))))):
        others = sorted(set(text) - {text[place]})
        letters[place] = draw.choice(["", text[place] * 2, *([draw.choice(others)] if others else [])])
    return "".join(letters)
