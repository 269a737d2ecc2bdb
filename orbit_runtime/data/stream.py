"""Prompts in a reproducible order, with a cursor that a checkpoint keeps.

Belongs here: epochs, shuffling, mixing sources by weight, skipping prompts, resuming. Does not belong here: rows
(`prompts`), what a policy scores on them (`pass_rates`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from orbit_runtime.data.pass_rates import PassRates
from orbit_runtime.data.permutation import shuffled
from orbit_runtime.data.prompts import PromptTable
from orbit_runtime.errors import DataError
from orbit_runtime.seeds import stream_key
from orbit_runtime.types import Group, Prompt


@dataclass
class _Part:
    """Prompts with an order of their own: those of a weighted source, or all."""

    span: range
    """Indices of the prompts in the table."""
    name: str
    weight: float = 1.0
    epoch: int = 0
    position: int = 0
    order: Sequence[int] = field(default_factory=tuple)
    visit: int = 0
    """Epoch of the last drawn prompt."""
    is_passed_over: bool = False
    """Whether none of its prompts may be drawn again."""


class PromptStream:
    """Draws prompts epoch after epoch. The order is a function of (seed, epoch); the cursor is a few integers.

    With weights, the draw's number determines the source, which has its own epochs; a prompt's visit is its source's
    epoch. `epochs=None` never ends. Otherwise `take` returns fewer prompts than requested at the end, and then none:
    the caller stops.
    """

    def __init__(
        self,
        table: PromptTable,
        *,
        seed: int,
        shuffle: bool = True,
        epochs: int | None = None,
        weights: Sequence[float] | None = None,
        rates: PassRates | None = None,
    ) -> None:
        """
        Args:
            weights: weight of each source; None to draw all prompts as one source.
            rates: decides which prompts to skip; None to skip none.

        Raises:
            DataError: a source with a weight has no prompts within `data.limit`.
        """
        self._table, self._seed, self._shuffle, self._epochs = table, seed, shuffle, epochs
        self.rates = rates
        self._drawn = 0
        if weights is None:
            self._parts = [_Part(range(len(table.prompts_P)), "")]
        else:
            names = [each.name for each in table.prompts_P.sources]
            self._parts = [_Part(*each) for each in zip(table.prompts_P.spans(), names, weights, strict=True)]
        for part in self._parts:
            if not part.span:
                raise DataError(
                    f"no prompt of {part.name} is used, although it has a weight",
                    where="spec.data.prompts",
                    fix="raise spec.data.limit, which counts rows of all sources in order, or leave the source out",
                )
            part.order = self._order_of(part)

    def take(self, n: int, *, step: int = 0) -> list[Prompt]:
        """The next n prompts. One draw may cross an epoch's end, so a prompt can appear twice with different visits.

        Args:
            step: the step for which they are drawn, which determines the pass rates that may be known.
        """
        taken: list[Prompt] = []
        while len(taken) < n and (part := self._choose()):
            index = self._next(part, step)
            if index is None:
                continue
            self._drawn += 1
            taken.append(replace(self._table.prompts_P[index], visit=part.visit))
        return taken

    def epochs(self, cursor: Mapping[str, Any]) -> dict[str, float]:
        """Source → epochs completed at a `state()`, fractions included; empty without weights."""
        spans = {each.name: len(each.span) for each in self._parts}
        return {name: epoch + at / spans[name] for name, (epoch, at) in cursor.get("sources", {}).items()}

    @property
    def passed_over(self) -> bool:
        """Whether prompts are left but none of them may be drawn."""
        return any(each.is_passed_over for each in self._parts)

    def record(self, step: int, groups_P: Sequence[Group]) -> None:
        """Adds a finished step's rewards, if pass rates are kept."""
        if self.rates is not None:
            rows = self._table.prompts_P
            self.rates.record(
                step,
                (
                    (rows.number_of(each.prompt.prompt_id), each.prompt.visit, [one.reward for one in each.rollouts_G])
                    for each in groups_P
                ),
            )

    def state(self) -> dict[str, Any]:
        """The cursor, as JSON."""
        if len(self._parts) == 1 and not self._parts[0].name:
            (part,) = self._parts
            cursor: dict[str, Any] = {"epoch": part.epoch, "position": part.position}
        else:
            cursor = {"drawn": self._drawn, "sources": {each.name: [each.epoch, each.position] for each in self._parts}}
        passed_over = [each.name for each in self._parts if each.is_passed_over]
        return {**cursor, **({"passed_over": passed_over} if passed_over else {}), "digest": self._table.digest}

    def with_rates(self, cursor: Mapping[str, Any]) -> Mapping[str, Any]:
        """An earlier `state()` with the current pass rates: draws after it see no more than they did."""
        return cursor if self.rates is None else {**cursor, "rates": self.rates.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues after the prompts taken when `state` was saved.

        Raises:
            DataError: the prompts are not those of the saved cursor.
        """
        if state["digest"] != self._table.digest:
            raise DataError(
                f"the prompts changed since the checkpoint: {state['digest']} then, {self._table.digest} now",
                where="spec.data.prompts",
                fix="restore the files, or start a new run",
            )
        for part in self._parts:
            epoch, position = state["sources"][part.name] if part.name else (state["epoch"], state["position"])
            part.epoch, part.position, part.is_passed_over = (
                int(epoch),
                int(position),
                part.name in state.get("passed_over", ()),
            )
            part.order = self._order_of(part)
        self._drawn = int(state.get("drawn", 0))
        if self.rates is not None and "rates" in state:
            self.rates.restore(state["rates"])

    def _live(self) -> list[_Part]:
        return [
            each for each in self._parts
            if not each.is_passed_over and (self._epochs is None or each.epoch < self._epochs)
        ]  # fmt: skip

    def _choose(self) -> _Part | None:
        """The part for the next draw: chosen by the draw's number among those that have prompts left."""
        live = self._live()
        if len(live) < 2:
            return live[0] if live else None
        ends = list(accumulate(each.weight for each in live))
        place = stream_key(self._seed, "mix", self._drawn) / 2**64 * ends[-1]
        return live[min(bisect_right(ends, place), len(live) - 1)]

    def _next(self, part: _Part, step: int) -> int | None:
        """The part's next prompt that may be drawn; None if its epochs end first, or none is left."""
        for _ in range(len(part.span) * (1 + (self.rates.patience if self.rates else 0))):
            if self._epochs is not None and part.epoch >= self._epochs:
                return None
            index, part.visit = part.span[part.order[part.position]], part.epoch
            part.position += 1
            if part.position == len(part.order):
                part.epoch, part.position = part.epoch + 1, 0
                part.order = self._order_of(part)
            if self.rates is None or self.rates.may_draw(self._table.prompts_P.chosen[index], part.visit, step):
                return index
        part.is_passed_over = True
        return None

    def _order_of(self, part: _Part) -> Sequence[int]:
        count = len(part.span)
        if not self._shuffle or (self._epochs is not None and part.epoch >= self._epochs):
            return range(count)
        name = (part.name,) if part.name else ()
        return shuffled(count, stream_key(self._seed, "shuffle", part.epoch, *name))
