"""Charts as inline SVG: no library, readable offline, coloured by the page's own light and dark variables.

Belongs here: turning numbers into `<svg>` with a text alternative. Every text that goes in is escaped.
Does not belong here: choosing what to plot (`report_html`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 360, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 10, 24
MAX_POINTS = 300


@dataclass(frozen=True, slots=True)
class Series:
    """One line or one layer. `None` and non-finite values leave a gap."""

    name: str
    values: Sequence[float | None]
    style: int = 0
    """Which of the page's colours, 0-5; 9 is the limit's dashed line."""
    band: tuple[Sequence[float | None], Sequence[float | None]] | None = None
    """Lower and upper ends of an interval around each value."""


def draw_lines(title: str, steps: Sequence[int], series: Sequence[Series], *, log: bool = False) -> str:
    """A line chart over steps. With `log` the vertical axis is logarithmic; zeros then sit on its floor."""
    steps, series = _thin(steps, series)
    drawn = [values for line in series for values in (line.values, *(line.band or ()))]
    known = [value for values in drawn for value in values if value is not None and math.isfinite(value)]
    if not known:
        return _nothing(title)
    scale = _log_scale(known) if log else _linear_scale(min(known), max(known))
    parts = [_axes(steps, scale)]
    for line in series:
        parts += _bars(steps, line, scale)
        path = _path(steps, line.values, scale)
        parts.append(f'<path class="line c{line.style}" d="{path}"/>')
        single = [i for i, value in enumerate(line.values) if _is_shown(value)]
        if len(single) == 1:
            x, y = _x(steps, single[0]), scale.y(line.values[single[0]] or 0.0)
            parts.append(f'<circle class="dot c{line.style}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
    return _svg(title, steps, series, "".join(parts))


def draw_stack(title: str, steps: Sequence[int], series: Sequence[Series]) -> str:
    """Layers on top of each other; a missing value counts as nothing."""
    steps, series = _thin(steps, series)
    bottom = [0.0] * len(steps)
    layers: list[tuple[Series, list[float], list[float]]] = []
    for layer in series:
        top = [base + (value if _is_shown(value) and value is not None else 0.0)
               for base, value in zip(bottom, layer.values, strict=True)]  # fmt: skip
        layers.append((layer, bottom, top))
        bottom = top
    if not steps or max(bottom, default=0.0) <= 0:
        return _nothing(title)
    scale = _linear_scale(0.0, max(bottom))
    parts = []
    for layer, low, high in layers:
        if len(steps) == 1:
            y, height = scale.y(high[0]), scale.y(low[0]) - scale.y(high[0])
            parts.append(f'<rect class="area c{layer.style}" x="{WIDTH / 2 - 20}" y="{y:.1f}" width="40" '
                         f'height="{max(0.0, height):.1f}"/>')  # fmt: skip
            continue
        there = [f"{_x(steps, i):.1f} {scale.y(value):.1f}" for i, value in enumerate(high)]
        back = [f"{_x(steps, i):.1f} {scale.y(value):.1f}" for i, value in reversed([*enumerate(low)])]
        parts.append(f'<path class="area c{layer.style}" d="M{" L".join([*there, *back])}Z"/>')
    return _svg(title, steps, series, "".join(parts) + _axes(steps, scale))


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool

    def y(self, value: float) -> float:
        if self.log:
            value = math.log10(max(value, 10**self.low))
        share = (value - self.low) / (self.high - self.low)
        return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - min(1.0, max(0.0, share)))


def _linear_scale(low: float, high: float) -> _Scale:
    if high == low:
        pad = abs(high) * 0.1 or 1.0
        low, high = low - pad, high + pad
    step = _nice((high - low) / 4)
    first, last = math.floor(low / step), math.ceil(high / step)
    ticks = tuple(index * step for index in range(first, last + 1))
    return _Scale(ticks[0], ticks[-1], ticks, log=False)


def _log_scale(values: Sequence[float]) -> _Scale:
    positive = [value for value in values if value > 0] or [1e-9]
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    if high == low:
        high += 1
    every = max(1, math.ceil((high - low) / 5))
    return _Scale(low, high, tuple(10.0**power for power in range(low, high + 1, every)), log=True)


def _nice(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= step * 0.999)


def _x(steps: Sequence[int], index: int) -> float:
    span = steps[-1] - steps[0]
    share = (steps[index] - steps[0]) / span if span else 0.5
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * share


def _path(steps: Sequence[int], values: Sequence[float | None], scale: _Scale) -> str:
    pieces, pen_down = [], False
    for index, value in enumerate(values):
        if value is None or not math.isfinite(value):
            pen_down = False
            continue
        pieces.append(f"{'L' if pen_down else 'M'}{_x(steps, index):.1f} {scale.y(value):.1f}")
        pen_down = True
    return "".join(pieces)


def _bars(steps: Sequence[int], line: Series, scale: _Scale) -> list[str]:
    """An upright bar from end to end of each interval."""
    bars = []
    for index, (low, high) in enumerate(zip(*(line.band or ((), ())), strict=True)):
        if low is not None and high is not None:
            x = f"{_x(steps, index):.1f}"
            bars.append(
                f'<line class="bar c{line.style}" x1="{x}" x2="{x}" y1="{scale.y(high):.1f}" y2="{scale.y(low):.1f}"/>'
            )
    return bars


def _axes(steps: Sequence[int], scale: _Scale) -> str:
    parts = []
    for tick in scale.ticks:
        y = scale.y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{_tick(tick)}</text>')
    ends = [(0, "start" if len(steps) > 1 else "middle")] + ([(len(steps) - 1, "end")] if len(steps) > 1 else [])
    for index, anchor in ends:
        parts.append(f'<text x="{_x(steps, index):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">'
                     f"step {steps[index]}</text>")  # fmt: skip
    return f'<g aria-hidden="true">{"".join(parts)}</g>'


def _tick(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) < 1e-3 or abs(value) >= 1e5:
        mantissa, power = f"{value:.0e}".split("e")
        return f"{mantissa}e{int(power)}"
    return f"{value:.6g}" if abs(value) >= 1 else f"{value:.3g}"


def _svg(title: str, steps: Sequence[int], series: Sequence[Series], body: str) -> str:
    data = {"x": list(steps), "s": [[line.name, [_short(value) for value in line.values]] for line in series]}
    label = escape(f"{title}. {describe(steps, series)}", quote=True)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" '
        f'data-left="{_LEFT}" data-right="{WIDTH - _RIGHT}" data-top="{_TOP}" data-bottom="{HEIGHT - _BOTTOM}" '
        f'data-points="{escape(json.dumps(data), quote=True)}">{body}</svg>'
    )


def describe(steps: Sequence[int], series: Sequence[Series]) -> str:
    """The chart in words: each line's first, last, lowest and highest value."""
    parts = []
    for line in series:
        known = [value for value in line.values if value is not None and math.isfinite(value)]
        if known:
            parts.append(f"{line.name}: first {known[0]:.4g}, last {known[-1]:.4g}, "
                         f"lowest {min(known):.4g}, highest {max(known):.4g}")  # fmt: skip
    return f"Steps {steps[0]} to {steps[-1]}. {'; '.join(parts)}." if steps else "No data."


def _thin(steps: Sequence[int], series: Sequence[Series]) -> tuple[Sequence[int], Sequence[Series]]:
    """At most `MAX_POINTS` evenly spread points, the first and the last among them."""
    if len(steps) <= MAX_POINTS:
        return steps, series
    keep = sorted({round(index * (len(steps) - 1) / (MAX_POINTS - 1)) for index in range(MAX_POINTS)})
    thinned = [
        Series(
            line.name,
            [line.values[i] for i in keep],
            line.style,
            line.band and ([line.band[0][i] for i in keep], [line.band[1][i] for i in keep]),
        )
        for line in series
    ]
    return [steps[i] for i in keep], thinned


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def _is_shown(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _nothing(title: str) -> str:
    return f'<p class="nothing" role="img" aria-label="{escape(title, quote=True)}: no data">no data yet</p>'
