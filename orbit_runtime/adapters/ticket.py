"""A ticket: what an engine finds in a folder in place of an adapter's files while their bytes come another way.

    adapter_config.json   as published: the engine reads it before anything else
    transport.json        how the bytes come, and the digest that they and the configuration must have

The bytes are those of the files, one after the other. Whatever carried them, what arrived is known by its digest.

Belongs here: the ticket, and whether what arrived is what was published. Does not belong here: sending
(`rollout.handover`), receiving (`sglang_plugin.arrival`), the broadcast group (`group`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from orbit_runtime.adapters.state import CONFIG_FILE, files_digest
from orbit_runtime.errors import ModelError
from orbit_runtime.types import AdapterFiles

TICKET_FILE = "transport.json"
NOT_ARRIVED = "the adapter did not arrive"
"""Begins the message of what an adapter that comes as files does not suffer from: the client then sends files."""


class NotArrivedError(Exception):
    """The bytes did not come; nothing is known against them."""

    def __init__(self, why: object) -> None:
        super().__init__(f"{NOT_ARRIVED}: {why}")


@dataclass(frozen=True)
class Ticket:
    """Of one adapter, for every process that loads it."""

    kind: Literal["SharedMemory", "Broadcast"]
    digest: str
    """Of all files, the configuration included."""
    sizes: Mapping[str, int]
    """Bytes of each file but the configuration, in the order in which they come."""
    source: Mapping[str, Any]
    """Where they come from; each kind has its own."""

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes.values())


def payload(adapter: AdapterFiles) -> list[bytes]:
    """The bytes that go, one part after the other; what `read_payload` undoes."""
    return [adapter.files[name] for name in _carried(adapter)]


def write_ticket(
    folder: Path, adapter: AdapterFiles, kind: Literal["SharedMemory", "Broadcast"], source: Mapping[str, Any]
) -> None:
    """Into a new folder."""
    folder.mkdir()
    sizes = {name: len(adapter.files[name]) for name in _carried(adapter)}
    (folder / CONFIG_FILE).write_bytes(adapter.files[CONFIG_FILE])
    (folder / TICKET_FILE).write_text(json.dumps(asdict(Ticket(kind, adapter.digest, sizes, source))))


def read_ticket(folder: Path) -> Ticket | None:
    """None: this folder holds the files themselves."""
    try:
        return Ticket(**json.loads((folder / TICKET_FILE).read_bytes()))
    except FileNotFoundError:
        return None


def read_payload(ticket: Ticket, folder: Path, stream: BinaryIO) -> dict[str, bytes]:
    """The adapter's files. Raises ModelError where they are not those that were published."""
    files = {name: stream.read(size) for name, size in ticket.sizes.items()}
    arrived = sum(map(len, files.values())) + len(stream.read())
    files[CONFIG_FILE] = (folder / CONFIG_FILE).read_bytes()
    found = files_digest(files)
    if found != ticket.digest or arrived != ticket.num_bytes:
        raise ModelError(
            f"{arrived} bytes arrived by {ticket.kind} as {found}; published were {ticket.num_bytes} as {ticket.digest}"
        )
    return files


def _carried(adapter: AdapterFiles) -> list[str]:
    return sorted(adapter.files.keys() - {CONFIG_FILE})
