"""A ticket: what an engine finds in a folder instead of an adapter's files if their bytes are in the host's memory.

    adapter_config.json   as published: the engine reads it before anything else
    transport.json        where the memory is, and the place and size of each file

Received bytes are not hashed here, and neither are files that are read: the proof of the publish reads the slots back,
and their digest must be the published one, whatever carried the bytes (decision 12).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orbit_runtime.adapters.buffer import MemoryOpening
from orbit_runtime.adapters.files import CONFIG_FILE
from orbit_runtime.types import AdapterFiles

TICKET_FILE = "transport.json"
NOT_ARRIVED = "the adapter did not arrive"
"""Prefix of an error message that would not occur if the adapter came as files: the client then sends files."""


class NotArrivedError(Exception):
    """The bytes did not arrive; this does not mean that they are wrong."""

    def __init__(self, why: object) -> None:
        super().__init__(f"{NOT_ARRIVED}: {why}")


@dataclass(frozen=True)
class Ticket:
    """The ticket of one adapter, for every process that loads it."""

    files: Mapping[str, int]
    """Bytes of each file, the configuration included."""
    memory: MemoryOpening
    places: Mapping[str, tuple[int, int]]
    """First byte and size of each file in that memory."""


def write_ticket(
    folder: Path, adapter: AdapterFiles, memory: MemoryOpening, places: Mapping[str, tuple[int, int]]
) -> None:
    """Writes into a new folder."""
    folder.mkdir()
    (folder / CONFIG_FILE).write_bytes(adapter.files[CONFIG_FILE])
    content = {
        "files": {name: memoryview(data).nbytes for name, data in adapter.files.items()},
        "path": memory.path,
        "title": memory.title,
        "places": places,
    }
    (folder / TICKET_FILE).write_text(json.dumps(content))


def read_ticket(folder: Path) -> Ticket | None:
    """Reads the folder's ticket; None if the folder holds the files themselves."""
    try:
        content = json.loads((folder / TICKET_FILE).read_bytes())
    except FileNotFoundError:
        return None
    return Ticket(content["files"], MemoryOpening(content["path"], content["title"]), content["places"])
