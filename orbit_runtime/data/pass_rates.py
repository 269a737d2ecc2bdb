"""Share of each prompt's rollouts that solve it, and which prompts are therefore worth drawing.

The results that a draw may use depend only on its step, never on when it is made. With `maxStaleness` k, the prompts of
step t are drawn once t - 1 - k steps are trained, so they use the results of those steps and of no later ones. After a
resume, when several steps are drawn at once, they use the same results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NEWEST = 0.5
"""Weight of the newest visit in a running rate: as much as all earlier ones together, as the policy changes."""


@dataclass(frozen=True, slots=True)
class PassRateBounds:
    """Bounds of the pass rate within which a prompt is worth training on."""

    low: float
    high: float
    passes: float
    """Smallest reward with which a rollout passes."""
    revisit: int | None = None
    """Epochs after which an excluded prompt is drawn once more; None for never."""


class PassRates:
    """Running pass rates by prompt. An untried prompt is always worth drawing."""

    def __init__(self, bounds: PassRateBounds, *, delay: int = 0) -> None:
        """Args: delay: number of steps that may be sampled ahead of the one that trains."""
        self._bounds, self._delay = bounds, delay
        self._settled: dict[int, tuple[float, int]] = {}
        """Prompt → running rate, and visit of the newest try, excluding the steps in `_recent`."""
        self._recent: dict[int, dict[int, tuple[float, int]]] = {}
        """Step → prompt → pass rate in that step, and its visit."""

    @property
    def patience(self) -> int:
        """Number of further epochs after which another would find no new prompt."""
        return 0 if self._bounds.revisit is None else self._bounds.revisit + 1

    def may_draw(self, prompt: int, visit: int, step: int) -> bool:
        """Whether the prompt's rate, as known to a draw for `step`, is within the bounds."""
        known = self._known(prompt, step - 1 - self._delay)
        if known is None or self._bounds.low <= known[0] <= self._bounds.high:
            return True
        return self._bounds.revisit is not None and visit - known[1] > self._bounds.revisit

    def record(self, step: int, tried: Iterable[tuple[int, int, Sequence[float | None]]]) -> None:
        """Adds the rewards of a finished step's rollouts.

        Args:
            tried: prompt, visit and rewards; None for a rollout without a reward, which does not count.
        """
        found: dict[int, tuple[float, int]] = {}
        for prompt, visit, rewards in tried:
            scored = [reward for reward in rewards if reward is not None]
            if scored:
                rate = sum(reward >= self._bounds.passes for reward in scored) / len(scored)
                found[prompt] = _joined(found.get(prompt), (rate, visit))
        self._recent[step] = found
        for old in sorted(each for each in self._recent if each <= step - self._delay):
            for prompt, tried_then in self._recent.pop(old).items():
                self._settled[prompt] = _joined(self._settled.get(prompt), tried_then)

    def counts(self) -> tuple[int, int, int]:
        """Numbers of prompts tried, and with rates below and above the bounds, after all known steps."""
        newest = max(self._recent, default=0)
        everything = {*self._settled}.union(*self._recent.values())
        rates = [known[0] for prompt in everything if (known := self._known(prompt, newest)) is not None]
        low, high = self._bounds.low, self._bounds.high
        return len(rates), sum(rate < low for rate in rates), sum(rate > high for rate in rates)

    def state(self) -> dict[str, Any]:
        """The counts as JSON; every float keeps its bits."""
        return {
            "settled": [[prompt, *known] for prompt, known in sorted(self._settled.items())],
            "recent": {
                str(step): [[prompt, *known] for prompt, known in sorted(tried.items())]
                for step, tried in sorted(self._recent.items())
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._settled = _read(state["settled"])
        self._recent = {int(step): _read(tried) for step, tried in state["recent"].items()}

    def _known(self, prompt: int, newest: int) -> tuple[float, int] | None:
        """Rates from the steps up to `newest`."""
        known = self._settled.get(prompt)
        for step in sorted(self._recent):
            if step <= newest and prompt in self._recent[step]:
                known = _joined(known, self._recent[step][prompt])
        return known


def _joined(before: tuple[float, int] | None, tried: tuple[float, int]) -> tuple[float, int]:
    if before is None:
        return tried
    return (1 - NEWEST) * before[0] + NEWEST * tried[0], max(before[1], tried[1])


def _read(rows: Iterable[Sequence[Any]]) -> dict[int, tuple[float, int]]:
    return {int(prompt): (float(rate), int(visit)) for prompt, rate, visit in rows}
