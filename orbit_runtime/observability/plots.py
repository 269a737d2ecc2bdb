"""Charts as inline SVG: no library, readable offline, coloured by the page's light and dark variables.

Belongs here: turning numbers into `<svg>` with a text alternative, and with the data that the page's script needs to
show values and smooth lines. All text is escaped. Does not belong here: choosing what to plot (`charts`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

WIDTH, HEIGHT = 360, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 10, 24
MAX_POINTS = 300
"""Most points of a line. With more steps, each point is the mean of several, shaded from their
lowest to their highest.
"""
_DOTTED = 12
"""A line with at most this many values shows a dot for each."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line or one layer. `None` and non-finite values leave a gap."""

    name: str
    values: Sequence[float | None]
    style: int = 0
    """Index of the page's colour, 0-5; 9 is the limit's dashed line."""
    band: tuple[Sequence[float | None], Sequence[float | None]] | None = None
    """Lower and upper ends of an interval around each value."""


def draw_lines(
    title: str, steps: Sequence[int], series: Sequence[Series], *, log: bool = False, most: float | None = None
) -> str:
    """A line chart over steps; `""` if no line has a value.

    Args:
        log: the vertical axis is logarithmic; zeros then sit on its floor, and zeros alone on a linear axis.
        most: upper bound of the values, such as 1 for a share; the axis ends there at the latest.
    """
    said = describe(steps, series)
    steps, series, first = _thin(steps, series)
    known = _known(value for line in series for value in line.values)
    if not known:
        return ""
    scale = _log_scale(known) if log and max(known) > 0 else _linear_scale(*_reach(known, series), most)
    parts = [_axes(steps, scale)]
    for line in series:
        parts += _ribbon(steps, line, scale)
    for number, line in enumerate(series):
        path = _path(steps, line.values, scale)
        parts.append(f'<path class="line c{line.style}" data-line="{number}" d="{path}"/>')
        shown = [i for i, value in enumerate(line.values) if _is_shown(value)]
        if len(shown) <= _DOTTED and (line.style != 9 or len(shown) == 1):
            parts += [
                f'<circle class="dot c{line.style}" cx="{_x(steps, i):.1f}" cy="{scale.y(line.values[i] or 0.0):.1f}" '
                f'r="{3 if len(shown) == 1 else 2.2}"/>'
                for i in shown
            ]
    return _svg(f"{title}. {said}", steps, first, series, "".join(parts), scale)


def draw_stack(title: str, steps: Sequence[int], series: Sequence[Series]) -> str:
    """Stacked layers, with a missing value counting as 0; `""` if all are 0."""
    said = describe(steps, series)
    steps, series, first = _thin(steps, series)
    bottom = [0.0] * len(steps)
    layers: list[tuple[Series, list[float], list[float]]] = []
    for layer in series:
        top = [base + (value if _is_shown(value) and value is not None else 0.0)
               for base, value in zip(bottom, layer.values, strict=True)]  # fmt: skip
        layers.append((layer, bottom, top))
        bottom = top
    if not steps or max(bottom, default=0.0) <= 0:
        return ""
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
    return _svg(f"{title}. {said}", steps, first, series, "".join(parts) + _axes(steps, scale))


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


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _reach(known: Sequence[float], series: Sequence[Series]) -> tuple[float, float]:
    """The range of the axis: the lines, and the shades as far as the lines keep half of the height; of a line that is
    level, all of its shade."""
    low, high = min(known), max(known)
    ends = [_known(end) for line in series if line.band for end in line.band]
    lows, highs = [low, *(each for end in ends for each in end)], [high, *(each for end in ends for each in end)]
    widths = _known(
        None if a is None or b is None else b - a
        for line in series if line.band for a, b in zip(*line.band, strict=True)
    )  # fmt: skip
    pad = max((high - low) / 2, fmean(widths) / 4) if widths and high > low else math.inf
    return max(min(lows), low - pad), min(max(highs), high + pad)


def _linear_scale(low: float, high: float, most: float | None = None) -> _Scale:
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        # Numbers that differ in their last bits: between them there is no room for ticks.
        pad = abs(high) * 0.1
        low, high = (low - pad, high + pad) if pad else (0.0, 1.0)
    if most is not None and low < most < high:
        high = most
    step = _nice((high - low) / 4)
    first, last = math.floor(low / step), math.ceil(high / step)
    ticks = tuple(index * step for index in range(first, last + 1))
    return _Scale(ticks[0], ticks[-1], ticks, log=False)


def _log_scale(values: Sequence[float]) -> _Scale:
    positive = [value for value in values if value > 0]
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


def _ribbon(steps: Sequence[int], line: Series, scale: _Scale) -> list[str]:
    """A shade between the ends of the intervals; an upright bar for an isolated interval."""
    if line.band is None:
        return []
    pieces: list[list[tuple[int, float, float]]] = [[]]
    for index, (low, high) in enumerate(zip(*line.band, strict=True)):
        if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
            pieces.append([])
        else:
            pieces[-1].append((index, low, high))
    drawn = []
    for piece in pieces:
        if len(piece) == 1:
            index, low, high = piece[0]
            x = f"{_x(steps, index):.1f}"
            ends = f'y1="{scale.y(high):.1f}" y2="{scale.y(low):.1f}"'
            drawn.append(f'<line class="bar c{line.style}" x1="{x}" x2="{x}" {ends}/>')
        elif piece:
            there = [f"{_x(steps, index):.1f} {scale.y(high):.1f}" for index, _, high in piece]
            back = [f"{_x(steps, index):.1f} {scale.y(low):.1f}" for index, low, _ in reversed(piece)]
            drawn.append(f'<path class="band c{line.style}" d="M{" L".join([*there, *back])}Z"/>')
    return drawn


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
        mantissa, power = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(power)}"
    return f"{value:.6g}" if abs(value) >= 1 else f"{value:.3g}"


def _svg(
    label: str,
    steps: Sequence[int],
    first: Sequence[int],
    series: Sequence[Series],
    body: str,
    scale: _Scale | None = None,
) -> str:
    """Args: scale: the scale of lines that may be smoothed."""
    data = {
        "x": list(steps),
        "from": list(first) if list(first) != list(steps) else None,
        "s": [
            [line.name, [_short(value) for value in line.values], line.style,
             line.band and [[_short(value) for value in end] for end in line.band]]
            for line in series
        ],
    }  # fmt: skip
    axis = f'data-low="{scale.low}" data-high="{scale.high}" data-log="{int(scale.log)}" ' if scale else ""
    points = escape(json.dumps(data, separators=(",", ":"), ensure_ascii=False), quote=False).replace("'", "&#39;")
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" aria-label="{escape(label, quote=True)}" {axis}'
        f'data-left="{_LEFT}" data-right="{WIDTH - _RIGHT}" data-top="{_TOP}" data-bottom="{HEIGHT - _BOTTOM}" '
        f"data-points='{points}'>{body}</svg>"
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


def _thin(steps: Sequence[int], series: Sequence[Series]) -> tuple[Sequence[int], Sequence[Series], Sequence[int]]:
    """At most `MAX_POINTS` points; each ends at its step, and the third item gives its first step."""
    if len(steps) <= MAX_POINTS:
        return steps, series, steps
    keep = sorted({round(index * (len(steps) - 1) / (MAX_POINTS - 1)) for index in range(MAX_POINTS)})
    bins = [range(before + 1, end + 1) for before, end in zip([-1, *keep[:-1]], keep, strict=True)]
    return [steps[each[-1]] for each in bins], [_gather(line, bins) for line in series], [steps[b[0]] for b in bins]


def _gather(line: Series, bins: Sequence[range]) -> Series:
    def of(values: Sequence[float | None], how: Callable[[Sequence[float]], float]) -> list[float | None]:
        found = ([value for i in each if (value := values[i]) is not None and math.isfinite(value)] for each in bins)
        return [how(each) if each else None for each in found]

    low, high = line.band or (line.values, line.values)
    ends = (of(low, fmean), of(high, fmean)) if line.band else (of(low, min), of(high, max))
    return Series(line.name, of(line.values, fmean), line.style, ends)


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def _is_shown(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
