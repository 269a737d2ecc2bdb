"""The result of one stage: a JSON file that is whole after every number that comes to it.

Belongs here: its content and how it is written. Does not belong here: what is measured (`stages`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

Status = Literal["running", "passed", "failed", "out of time", "not measured"]
BAD: tuple[Status, ...] = ("running", "failed", "out of time")
"""What lets the proof end with 1: a stage that was asked for and shows nothing, or the wrong thing."""


NO_CARD = "cpu"
"""Name of the card of a machine where torch finds no CUDA device."""


class WrongResult(Exception):
    """A stage measured, and what it found must not be."""


class Record:
    """One file, written by one process at a time: who starts the stage, the stage, and again who started it."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path, self.content = path, content

    @classmethod
    def begin(cls, path: Path, stage: str, facts: Mapping[str, Any]) -> Record:
        """Writes it as `running`."""
        record = cls(path, {"stage": stage, **facts, "status": "running", "began": time.time(), "found": {}})
        path.parent.mkdir(parents=True, exist_ok=True)
        record.write()
        return record

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """None where there is none, or one that was cut short."""
        try:
            return cls(path, json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return None

    @property
    def status(self) -> Status:
        status: Status = self.content["status"]
        return status

    @property
    def is_tiny(self) -> bool:
        return bool(self.content["tiny"])

    @property
    def device(self) -> str:
        return NO_CARD if self.content["card"] == NO_CARD else "cuda"

    def add(self, name: str, value: object) -> None:
        """At once on disk: what comes later may end the process."""
        self.content["found"][name] = value
        self.write()
        print(f"{name}: {json.dumps(value)}", flush=True)

    def end(self, status: Status, why: str = "", output: str = "") -> None:
        self.content |= {"status": status, "why": why, "seconds": round(time.time() - self.content["began"], 1)}
        if status in BAD:
            self.content["output"] = output
        self.write()

    def write(self) -> None:
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        partial.replace(self.path)
