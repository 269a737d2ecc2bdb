"""Collects what an agent does: which items are kept, in what form, and their files."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from orbit_runtime.agents import files
from orbit_runtime.agents.items import TrajectoryItem, check_items, check_sync, item_from, plain
from orbit_runtime.errors import UsageError


class TrajectoryStrategy(ABC):
    """Decides what a dataset keeps. Both methods are plain functions: capturing is part of an agent's step."""

    @abstractmethod
    def should_capture(self, item: TrajectoryItem) -> bool:
        """Whether to keep the item."""

    def process(self, item: TrajectoryItem) -> TrajectoryItem | None:
        """The item to keep; None to drop it after all."""
        return item


class DefaultStrategy(TrajectoryStrategy):
    """Keeps everything unchanged."""

    def should_capture(self, item: TrajectoryItem) -> bool:
        return True


class _Import:
    """A reader that creates a dataset if called on the class, and fills the dataset if called on an instance."""

    def __init__(self, read: Callable[[str, str], list[TrajectoryItem]], is_text: Callable[[str], bool]) -> None:
        self._read = read
        self._is_text = is_text

    def __get__(
        self, dataset: TrajectoryDataset | None, owner: type[TrajectoryDataset]
    ) -> Callable[[str | os.PathLike[str]], TrajectoryDataset]:
        def read(source: str | os.PathLike[str]) -> TrajectoryDataset:
            target = owner() if dataset is None else dataset
            target.extend(files.load(source, self._read, is_text=self._is_text))
            return target

        return read


class TrajectoryDataset:
    """Items in the order in which they were captured.

    `import_json(source)` and `import_csv(source)` read what the exports wrote, from a path or from the text itself.
    Called on the class they create a dataset; called on a dataset they add to it, bypassing its strategy. Both return
    the dataset.

    Args:
        strategy: an object with `should_capture` and `process`; by default everything is kept unchanged.
        items: the initial items.
    """

    import_json = _Import(files.from_json, lambda text: text.lstrip().startswith("["))
    import_csv = _Import(files.from_csv, lambda text: "\n" in text)

    def __init__(
        self,
        strategy: TrajectoryStrategy | None = None,
        items: Iterable[TrajectoryItem | Mapping[str, Any]] = (),
    ) -> None:
        self.strategy: TrajectoryStrategy = DefaultStrategy() if strategy is None else strategy
        if isinstance(self.strategy, type):
            called = self.strategy.__name__
            raise UsageError(f"{called} is a class", where="strategy", fix=f"give an instance of it: `{called}()`")
        for name in ("should_capture", "process"):
            check_sync(getattr(self.strategy, name, None), f"strategy.{name}")
        self._items: list[TrajectoryItem] = []
        self.extend(items)

    @property
    def items(self) -> list[TrajectoryItem]:
        """A copy of the list: changing it does not change the dataset."""
        return list(self._items)

    def capture(self, item: TrajectoryItem | Mapping[str, Any]) -> TrajectoryItem | None:
        """Applies the strategy, keeps its result and returns it; None if the item was not captured."""
        given = item_from(item, "capture")
        if not plain(self.strategy.should_capture(given), "strategy.should_capture"):
            return None
        made = plain(self.strategy.process(given), "strategy.process")
        if made is None:
            return None
        kept = item_from(made, "strategy.process")
        self._items.append(kept)
        return kept

    def extend(self, items: Iterable[TrajectoryItem | Mapping[str, Any]]) -> None:
        """Adds items without the strategy."""
        self._items += [item_from(each, f"items[{index}]") for index, each in enumerate(check_items(items, "items"))]

    def export_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The items as a JSON list; also written to `path` if given."""
        return _export(files.to_json(self._items), path)

    def export_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """The items as CSV, with no formulas that a spreadsheet would run; also written to `path` if given."""
        return _export(files.to_csv(self._items), path)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[TrajectoryItem]:
        return iter(self._items)

    def __getitem__(self, index: int) -> TrajectoryItem:
        return self._items[index]


def _export(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        files.save(path, text)
    return text
