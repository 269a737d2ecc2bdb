"""What a rank is doing, written where it can be read after its death: stage, step, collective.

Belongs here: the note and its file. Does not belong here: what follows from it (`rank_verdict`).

A note costs one small write, so a trainer may leave one per collective. Outside a rank, notes go nowhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

LENGTH = 512


@dataclass(frozen=True, slots=True)
class Note:
    """The last word of a rank."""

    stage: str | None = None
    """Such as `train`; the method that was called unless the rank says more."""
    step: int | None = None
    """The last one that it began."""
    collective: str | None = None
    """The one that it waits in."""
    count: int = 0
    """Of all notes so far: one that has not changed for long tells of a rank that does not get on."""


class _Writer:
    def __init__(self) -> None:
        self.file: int | None = None
        self.last = Note()

    def write(self, note: Note) -> None:
        self.last = replace(note, count=self.last.count + 1)
        if self.file is not None:
            line = json.dumps(asdict(self.last)).encode()[: LENGTH - 1]
            # A full disk must not end a rank that only tells how it is.
            with suppress(OSError):
                os.pwrite(self.file, line.ljust(LENGTH), 0)


_writer = _Writer()


def keep_notes(path: Path) -> None:
    """From now on this process's notes stand in this file."""
    _writer.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    _writer.write(Note())


def note(*, stage: str | None = None, step: int | None = None) -> None:
    """Says what this rank does now; what is not given stays as it was."""
    last = _writer.last
    _writer.write(replace(last, stage=stage or last.stage, step=last.step if step is None else step))


@contextmanager
def in_collective(name: str) -> Iterator[None]:
    """Within it, this rank waits for the others in that collective. It stays noted where the block fails."""
    before = _writer.last.collective
    _writer.write(replace(_writer.last, collective=name))
    yield
    _writer.write(replace(_writer.last, collective=before))


def read_note(path: Path) -> Note:
    """The last note in the file; an empty one where there is none."""
    try:
        return Note(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return Note()
