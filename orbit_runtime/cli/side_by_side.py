"""Answers of several models side by side in a terminal, all as they come."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from queue import SimpleQueue

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from orbit_runtime.observability.logs import printable

LEAST_WIDTH = 80
"""Characters of a terminal; in a narrower one, answers are better read one below the other."""
INTERRUPTED = "interrupted"


@dataclass
class ModelAnswer:
    """The part of an answer received so far."""

    text: str = ""
    reason: str = INTERRUPTED
    """Why it ended, in the API's words."""


Pieces = Generator[tuple[str, str | None]]
"""Yields pieces of an answer, the last one with the reason for its end. Closing it ends the request."""


def is_wide(console: Console) -> bool:
    return console.is_terminal and console.width >= LEAST_WIDTH


def show_side_by_side(console: Console, asked: Mapping[str, Pieces], note: str) -> dict[str, ModelAnswer]:
    """Shows the answers beside each other as they arrive, and returns each under its name. Ctrl-C ends all of them.

    Args:
        asked: nothing of them has been read yet.
        note: one line below.

    Raises:
        Exception: the first error of an answer.
    """
    answers = {name: ModelAnswer() for name in asked}
    arrived: SimpleQueue[tuple[str, tuple[str, str | None] | Exception | None]] = SimpleQueue()
    stopped = threading.Event()

    def read(name: str, pieces: Pieces) -> None:
        try:
            for piece in pieces:
                arrived.put((name, piece))
                if stopped.is_set():
                    break
        except Exception as error:  # the terminal's thread raises it
            arrived.put((name, error))
        finally:
            pieces.close()
            arrived.put((name, None))

    for name, pieces in asked.items():
        threading.Thread(target=read, args=(name, pieces), name=f"answer-{name}", daemon=True).start()
    left = len(asked)
    try:
        with Live(_Columns(console, answers, note), console=console, transient=True, refresh_per_second=12):
            while left:
                name, what = arrived.get()
                if isinstance(what, Exception):
                    raise what
                if what is None:
                    left -= 1
                else:
                    answers[name].text += what[0]
                    answers[name].reason = what[1] or answers[name].reason
    except KeyboardInterrupt:
        pass
    finally:
        stopped.set()
    console.print(_table(console, answers, note, rows=None))
    return answers


@dataclass(frozen=True)
class _Columns:
    """Draws one frame of the screen: the ends of the answers, as far as they fit."""

    console: Console
    answers: Mapping[str, ModelAnswer]
    note: str

    def __rich__(self) -> Table:
        return _table(self.console, self.answers, self.note, rows=max(1, self.console.height - 6))


def _table(console: Console, answers: Mapping[str, ModelAnswer], note: str, *, rows: int | None) -> Table:
    """Args: rows: of each answer, its last ones; None: all."""
    table = Table(box=box.MINIMAL, expand=True, caption=note or None, caption_justify="left")
    width = console.width // len(answers) - 4
    cells = []
    for name, answer in answers.items():
        table.add_column(Text(name), ratio=1, overflow="fold", vertical="top")
        text = Text(printable(answer.text), overflow="fold")
        if rows is not None:
            text = Text("\n").join(text.wrap(console, width)[-rows:])
        elif answer.reason != "stop":
            text.append(f" [{answer.reason}]", style="dim")
        cells.append(text)
    table.add_row(*cells)
    return table
