"""Progress bars on standard error for commands that take a while.

Belongs here: the bar. Does not belong here: a run's progress (`observability`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def bytes_bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """`show(bytes done, all bytes, what)`; silent where standard error is no terminal."""
    columns = (
        TextColumn(title), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
        TimeRemainingColumn(), TextColumn("{task.fields[what]}"),
    )  # fmt: skip
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda done, total, what: None
        return
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, what="")
        yield lambda done, total, what: progress.update(task, completed=done, total=total, what=what[-48:])


@contextmanager
def steps_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """`show(steps done, all steps)`; silent where standard error is no terminal."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title)
        yield lambda done, total: progress.update(task, completed=done, total=total)
