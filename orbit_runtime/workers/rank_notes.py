"""What a rank is doing, written where it can be read after its death: stage, step, collective.

Belongs here: the note and its file. Does not belong here: the conclusions from it (`rank_verdict`).

A note costs one small write, so a trainer can afford one for each collective. Outside a rank, notes are not written.
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
    """The last note of a rank."""

    stage: str | None = None
    """Such as `train`; the name of the called method unless the rank is more specific."""
    step: int | None = None
    """The last step that it began."""
    collective: str | None = None
    """The collective that it waits in."""
    count: int = 0
    """Number of notes so far: if it does not change for long, the rank makes no progress."""


class _Writer:
    def __init__(self) -> None:
        self.file: int | None = None
        self.last = Note()

    def write(self, note: Note) -> None:
        self.last = replace(note, count=self.last.count + 1)
        if self.file is not None:
            line = json.dumps(asdict(self.last)).encode()[: LENGTH - 1]
            # A full disk must not end a rank that only reports its state.
            with suppress(OSError):
                os.pwrite(self.file, line.ljust(LENGTH), 0)


_writer = _Writer()


def keep_notes(path: Path) -> None:
    """Writes this process's notes to this file from now on."""
    _writer.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    _writer.write(Note())


def note(*, stage: str | None = None, step: int | None = None) -> None:
    """Notes what this rank does now; arguments left out keep their values."""
    last = _writer.last
    _writer.write(replace(last, stage=stage or last.stage, step=last.step if step is None else step))


@contextmanager
def in_collective(name: str) -> Iterator[None]:
    """Notes that this rank waits for the others in a collective. If the block fails, the note stays."""
    before = _writer.last.collective
    _writer.write(replace(_writer.last, collective=name))
    yield
    _writer.write(replace(_writer.last, collective=before))


def read_note(path: Path) -> Note:
    """The last note in the file; an empty one if there is none."""
    try:
        return Note(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return Note()
