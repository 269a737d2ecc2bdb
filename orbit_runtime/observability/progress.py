"""Progress of a run: a live display on a terminal, lines of text in a file, JSON lines in a pod.

Belongs here: turning rows and notes into text.
Does not belong here: durable metrics (`loop.keep`) or the final summary's wording (`cli`).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Any, Protocol

from orbit_runtime.observability.logs import LogFormat, build_console, is_json
from orbit_runtime.observability.metrics import MetricsRow, format_value, is_unscored

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

LONG_STAGES = {"evaluate": "evaluating the policy"}
"""Stages between steps that may take longer than many steps → text that a log prints when they begin."""


class Progress(Protocol):
    """One interface for every audience."""

    def start(self, total: int, resumed_at: int = 0) -> None:
        """
        Args:
            resumed_at: steps done by earlier starts; at least `total` if nothing is left to train.
        """

    def stage(self, name: str) -> None:
        """Sets the current stage of the step, such as `collect`; before `start`, of the start, such as `model`."""

    def step(self, row: MetricsRow) -> None: ...

    def note(self, message: str, **facts: Any) -> None:
        """A message other than a step; it stays on the screen."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run ended without an error."""

    def close(self) -> None:
        """Restores the terminal, however the run ended. Safe to call at any time, and twice."""


class SilentProgress:
    """Shows nothing."""

    def start(self, total: int, resumed_at: int = 0) -> None:
        pass

    def stage(self, name: str) -> None:
        pass

    def step(self, row: MetricsRow) -> None:
        pass

    def note(self, message: str, **facts: Any) -> None:
        pass

    def finish(self, summary: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class JsonProgress:
    """One JSON object per line: `{"event": "stage" | "start" | "step" | "note" | "finish", …}`.

    Stages are those of the start, and `LONG_STAGES`; a step's others are not printed.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._is_started = False

    def start(self, total: int, resumed_at: int = 0) -> None:
        self._is_started = True
        self._write({"event": "start", "total": total, "resumed_at": resumed_at})

    def stage(self, name: str) -> None:
        if not self._is_started or name in LONG_STAGES:
            self._write({"event": "stage", "stage": name})

    def step(self, row: MetricsRow) -> None:
        self._write({"event": "step", **json.loads(row.to_json())})

    def note(self, message: str, **facts: Any) -> None:
        self._write({"event": "note", "message": message, **facts})

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._write({"event": "finish", **summary})

    def close(self) -> None:
        pass

    def _write(self, event: Mapping[str, Any]) -> None:
        _write_line(self._stream, json.dumps(event, default=str))


class PlainProgress:
    """One short line per step: for files, such as a batch job's log, and terminals that cannot redraw.

    Args:
        clock: gives the time at the start of each line; None for no time.
    """

    def __init__(self, stream: IO[str], clock: Callable[[], datetime] | None = None) -> None:
        self._stream = stream
        self._clock = clock
        self._pace = _Pace()
        self._is_started = False

    def start(self, total: int, resumed_at: int = 0) -> None:
        self._is_started = True
        self._pace.start(total, resumed_at)
        if 0 < resumed_at < total:
            self._print(f"resumed after step {resumed_at} of {total}")

    def stage(self, name: str) -> None:
        if not self._is_started:
            self._print(f"start: {name}")
        elif name in LONG_STAGES:
            self._print(LONG_STAGES[name])

    def step(self, row: MetricsRow) -> None:
        self._pace.step(row)
        left = format_seconds(self._pace.seconds_left())
        speed = format_value("tokens_per_second", row["tokens_per_second"])
        self._print(f"step {self._pace.done}/{self._pace.total}  {_headline(row)}  {speed} tokens/s  {left} left")

    def note(self, message: str, **facts: Any) -> None:
        self._print(_sentence(message, facts))

    def finish(self, summary: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass

    def _print(self, line: str) -> None:
        stamp = "" if self._clock is None else f"{self._clock():%Y-%m-%dT%H:%M:%SZ} "
        # A table keeps its columns.
        _write_line(self._stream, "\n".join(stamp + each for each in line.splitlines()))


SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class LiveProgress:
    """Two lines at the bottom of a terminal that are redrawn, one during the start; notes scroll away above them."""

    def __init__(self, console: Console, run: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._run = run
        self._clock = clock
        self._stage_began = clock()
        self._is_started = False
        self._pace = _Pace()
        self._stage = "starting"
        self._row: MetricsRow | None = None
        self._live: Live | None = None

    def start(self, total: int, resumed_at: int = 0) -> None:
        self._pace.start(total, resumed_at)
        self._is_started = True
        if 0 < resumed_at < total:
            self.note(f"resumed after step {resumed_at} of {total}")
        self._show()

    def stage(self, name: str) -> None:
        self._stage, self._stage_began = name, self._clock()
        self._show()
        if self._live is not None and not self._is_started:
            # The next stage may keep the interpreter from drawing, as an import does.
            self._live.refresh()

    def step(self, row: MetricsRow) -> None:
        self._row = row
        self._pace.step(row)

    def note(self, message: str, **facts: Any) -> None:
        from rich.text import Text

        self._console.print(Text("• " + _sentence(message, facts)), highlight=False)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._stage = str(summary.get("status", "done"))
        self.close()

    def close(self) -> None:
        if self._live is not None:
            # The stage of a start is of no interest once it has ended; the last step is.
            self._live.transient = not self._is_started
            self._live.stop()
            self._live = None

    def _show(self) -> None:
        from rich.live import Live

        if self._live is None:
            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4)
            self._live.start()

    def lines(self) -> tuple[Text, Text]:
        """The current display, no wider than the terminal."""
        return self._first_line(), self._second_line()

    def _render(self) -> Text:
        from rich.text import Text

        return Text("\n").join(self.lines()) if self._is_started else self._start_line()

    def _start_line(self) -> Text:
        from rich.text import Text

        seconds = self._clock() - self._stage_began
        frames = SPINNER if _can_unicode(self._console.encoding) else "|/-\\"
        name = f"{self._run[:24]} " if self._run else ""
        line = Text.assemble(
            (f"{frames[int(4 * seconds) % len(frames)]} ", "green"), (name, "bold"),
            (f"{self._stage}, {format_seconds(seconds)}", "cyan"), no_wrap=True,
        )  # fmt: skip
        line.truncate(self._console.width - 1)
        return line

    def _first_line(self) -> Text:
        from rich.text import Text

        pace, width = self._pace, self._console.width - 1
        count = f"step {pace.done}/{pace.total}"
        tail = f"{self._stage}, {format_seconds(pace.seconds_left())} left" if pace.done < pace.total else self._stage
        # The bar shrinks first, then the run's name is dropped; a tail of fixed width keeps the bar from jumping.
        room = min(50, width - len(count) - max(24, len(tail)) - 2)
        name = f"{self._run[:24]} " if room - len(self._run[:24]) - 1 >= 10 else ""
        room = max(0, room - len(name))
        full = round(room * pace.done / pace.total) if pace.total else 0
        filled, empty = ("━", "─") if _can_unicode(self._console.encoding) else ("#", "-")
        line = Text.assemble(
            (f"{name}{count} ", "bold"), (filled * full, "green"), (empty * (room - full), "dim"), (f" {tail}", "cyan")
        )
        line.no_wrap = True
        line.truncate(width)
        return line

    def _second_line(self) -> Text:
        from rich.text import Text

        if self._row is None:
            return Text("waiting for the first step"[: self._console.width - 1], style="dim", no_wrap=True)
        unicode = _can_unicode(self._console.encoding)
        parts = [
            f"{_headline(self._row)} {self._pace.trend(unicode)}",
            f"{format_value('tokens_per_second', self._row['tokens_per_second'])} tokens/s",
        ]
        if not is_unscored([self._row]):
            parts.append(f"parity {format_value('parity_mean', self._row['parity_mean'])}")
        line = Text("   ".join(part for part in parts), no_wrap=True, overflow="ellipsis")
        room = self._console.width - line.cell_len - 4
        if unicode and room >= 8:
            line.append("   " + sparkline(self._pace.rewards, min(24, room)), style="green")
        line.truncate(self._console.width - 1)
        return line


def _headline(row: MetricsRow) -> str:
    """Example: `reward 0.5312`, or for demonstrations `loss 0.1392`."""
    name = "loss" if is_unscored([row]) else "reward_mean"
    return f"{name.removesuffix('_mean')} {format_value(name, row[name])}"


class _Pace:
    """Steps done, their recent speed, and the trend of the reward or loss."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = 0
        self.done = 0
        self.rewards: list[float] = []
        self._seconds: float | None = None
        self._clock = clock
        self._last = clock()

    def start(self, total: int, resumed_at: int) -> None:
        # If more steps are done than requested, the total is the steps done: never `step 63/60`.
        self.total, self.done, self._last = max(total, resumed_at), resumed_at, self._clock()

    def step(self, row: MetricsRow) -> None:
        now = self._clock()
        seconds = row.number("seconds_total") or now - self._last
        self._last = now
        self._seconds = seconds if self._seconds is None else 0.8 * self._seconds + 0.2 * seconds
        self.done = int(row.number("step") or self.done + 1)
        reward = row.number("loss" if is_unscored([row]) else "reward_mean")
        if reward is not None and math.isfinite(reward):
            self.rewards.append(reward)

    def seconds_left(self) -> float | None:
        return None if self._seconds is None else max(0, self.total - self.done) * self._seconds

    def trend(self, unicode: bool) -> str:
        """The change since the first steps seen, each a mean of up to five steps, and its arrow."""
        if len(self.rewards) < 2:
            return ""
        half = max(1, min(5, len(self.rewards) // 2))
        change = (sum(self.rewards[-half:]) - sum(self.rewards[:half])) / half
        spread = max(self.rewards) - min(self.rewards)
        flat = abs(change) <= 0.05 * spread
        up, down, level = ("↑", "↓", "→") if unicode else ("up", "down", "flat")
        return f"{level if flat else up if change > 0 else down} {change:+.3f}"


def sparkline(values: Sequence[float], width: int) -> str:
    """All values in at most `width` block characters, each the mean of its share of the values."""
    count = min(width, len(values))
    if count < 1:
        return ""
    edges = [index * len(values) // count for index in range(count + 1)]
    shown = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(shown), max(shown)
    scale = (high - low) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * (value - low) / scale))] for value in shown)


def format_seconds(seconds: float | None) -> str:
    """`42 s`, `3:05 min`, `2:10 h`; `-` if unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def _write_line(stream: IO[str], line: str) -> None:
    try:
        stream.write(line + "\n")
        stream.flush()
    except OSError:
        # The reader has left (`| head`), which is no reason to stop training.
        return


def _sentence(message: str, facts: Mapping[str, Any]) -> str:
    """The message, and the facts that it does not already state."""
    unsaid = [f"{key} {value}" for key, value in facts.items() if str(value) not in message]
    return f"{message} ({', '.join(unsaid)})" if unsaid else message


def _can_unicode(encoding: str | None) -> bool:
    return (encoding or "").lower().replace("-", "").startswith("utf")


def build_progress(
    run: str = "",
    *,
    as_json: bool = False,
    log_format: LogFormat = "Auto",
    stream: IO[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Progress:
    """The form of progress that suits the output.

    Args:
        run: title on a terminal.
        as_json: JSON lines on standard output. Otherwise everything goes to `stream` (standard error), so that standard
        output has the result only.
        log_format: `Auto` is a live display on a terminal, JSON lines in a pod, and lines of text elsewhere.
        environ: the process's own environment if None.
    """
    if as_json:
        return JsonProgress(sys.stdout if stream is None else stream)
    environ = os.environ if environ is None else environ
    target = sys.stderr if stream is None else stream
    if is_json(log_format, is_terminal=target.isatty(), environ=environ):
        return JsonProgress(target)
    if log_format == "Text" or not target.isatty():
        return PlainProgress(target, lambda: datetime.now(UTC))
    console = build_console(target, highlight=False)
    is_dumb = console.is_dumb_terminal or environ.get("TERM", "") == ""
    return PlainProgress(target) if is_dumb else LiveProgress(console, run)
