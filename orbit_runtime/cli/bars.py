"""Progress bars and stages on standard error for commands that take a while."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from orbit_runtime.cli.output import format_bytes
from orbit_runtime.observability.logs import build_console
from orbit_runtime.observability.progress import build_progress

NOTE_SECONDS = 30.0
"""Between two lines, where there is no bar."""


@contextmanager
def bytes_bar(title: str, clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[int, int, str], None]]:
    """Yields `show(bytes done, all bytes, what)`: a bar, or a line every `NOTE_SECONDS` if standard error is no
    terminal.
    """
    columns = (
        TextColumn(title), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
        TimeRemainingColumn(), TextColumn("{task.fields[what]}"),
    )  # fmt: skip
    console = build_console(sys.stderr)
    if not console.is_terminal:
        is_due = _now_and_then(clock)

        def tell(done: int, total: int, what: str) -> None:
            if is_due():
                _print_line(f"{title}: {format_bytes(done)} of {format_bytes(total)}, {what}")

        yield tell
        return
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, what="")
        yield lambda done, total, what: progress.update(task, completed=done, total=total, what=what[-48:])


@contextmanager
def steps_bar(title: str, clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[int, int], None]]:
    """Yields `show(steps done, all steps)`: a bar, or a line every `NOTE_SECONDS` if standard error is no terminal."""
    console = build_console(sys.stderr)
    if not console.is_terminal:
        is_due = _now_and_then(clock)
        yield lambda done, total: _print_line(f"{title}: {done} of {total}") if is_due() else None
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def stages(title: str) -> Iterator[Callable[[str], None]]:
    """Yields `stage(name)`, which shows at once, like `orbit run`, what a command does now; cleared at the end.

    No other bar can be shown meanwhile.
    """
    progress = build_progress(title)
    try:
        yield progress.stage
    finally:
        progress.close()


def _print_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _now_and_then(clock: Callable[[], float]) -> Callable[[], bool]:
    """True `NOTE_SECONDS` after it last was, at the earliest."""
    last = clock()

    def is_due() -> bool:
        nonlocal last
        if clock() - last < NOTE_SECONDS:
            return False
        last = clock()
        return True

    return is_due


@contextmanager
def evaluation_bar(
    note: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[str, int, int], None]]:
    """Yields `show(model, its samples so far, all its samples)`: a bar if standard error is a terminal, else lines.

    Args:
        note: takes the lines: one when a model begins, one every `NOTE_SECONDS`, and one when it has ended.
    """
    console = build_console(sys.stderr)
    if not console.is_terminal:
        yield _noting(note, clock)
        return
    columns = (TextColumn("asking {task.fields[model]}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task, asked = progress.add_task("", model=""), ""

        def show(model: str, done: int, total: int) -> None:
            nonlocal asked
            if model != asked:
                # The time that is left is estimated from this model's own samples.
                progress.reset(task, total=total, completed=done, model=model)
                asked = model
            progress.update(task, completed=done, total=total)

        yield show


def _noting(note: Callable[[str], None], clock: Callable[[], float]) -> Callable[[str, int, int], None]:
    asked, is_due = "", _now_and_then(clock)

    def show(model: str, done: int, total: int) -> None:
        nonlocal asked, is_due
        if model != asked:
            asked, is_due = model, _now_and_then(clock)
            left = f"asking for {total - done} samples" + (f", {done} were there" if done else "")
            note(f"{model}: {left}" if done < total else f"{model}: all {total} samples were there")
        elif done == total or is_due():
            note(f"{model}: {done} of {total} samples")

    return show
