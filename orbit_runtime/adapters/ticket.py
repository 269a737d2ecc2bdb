"""A ticket: what an engine finds in a folder instead of an adapter's files if their bytes are sent another way.

    adapter_config.json   as published: the engine reads it before anything else
    transport.json        how the bytes are sent, and the size of each file

Received bytes are not hashed here, and neither are files that are read: the proof of the publish reads the slots back,
and their digest must be the published one, whatever carried the bytes (decision 12).
"""

from __future__ import annotations

import json
from collections.abc import Buffer, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from orbit_runtime.adapters.files import CONFIG_FILE
from orbit_runtime.errors import ModelError
from orbit_runtime.types import AdapterFiles

if TYPE_CHECKING:
    from torch import Tensor

TICKET_FILE = "transport.json"
NOT_ARRIVED = "the adapter did not arrive"
"""Prefix of an error message that would not occur if the adapter came as files: the client then sends files."""

BLOCK_BYTES = 1 << 22
"""Size of one message, so that both sides work in their caches: with 64 MiB it took nearly twice as long."""

Kind = Literal["SharedMemory", "Broadcast"]


class NotArrivedError(Exception):
    """The bytes did not arrive; this does not mean that they are wrong."""

    def __init__(self, why: object) -> None:
        super().__init__(f"{NOT_ARRIVED}: {why}")


@dataclass(frozen=True)
class Ticket:
    """The ticket of one adapter, for every process that loads it."""

    kind: Kind
    files: Mapping[str, int]
    """Bytes of each file, the configuration included."""
    source: Mapping[str, Any]
    """Where the bytes are; the fields depend on the kind."""

    @property
    def carried(self) -> Mapping[str, int]:
        """The files that are not in the ticket's folder, in the order in which they are sent."""
        return {name: self.files[name] for name in sorted(self.files.keys() - {CONFIG_FILE})}

    @property
    def num_bytes(self) -> int:
        return sum(self.carried.values())


def write_ticket(folder: Path, adapter: AdapterFiles, kind: Kind, source: Mapping[str, Any]) -> Ticket:
    """Writes into a new folder."""
    ticket = Ticket(kind, {name: memoryview(data).nbytes for name, data in adapter.files.items()}, source)
    folder.mkdir()
    (folder / CONFIG_FILE).write_bytes(adapter.files[CONFIG_FILE])
    (folder / TICKET_FILE).write_text(json.dumps({"kind": kind, "files": ticket.files, "source": source}))
    return ticket


def read_ticket(folder: Path) -> Ticket | None:
    """Reads the folder's ticket; None if the folder holds the files themselves."""
    try:
        content = json.loads((folder / TICKET_FILE).read_bytes())
    except FileNotFoundError:
        return None
    return Ticket(content["kind"], content["files"], content["source"])


def carried_bytes(adapter: AdapterFiles) -> Iterator[Buffer]:
    """The bytes to send, one file after another."""
    yield from (adapter.files[name] for name in sorted(adapter.files.keys() - {CONFIG_FILE}))


def blocks(data: Buffer) -> Iterator[memoryview]:
    """A file in the blocks in which it is broadcast: both sides split it alike, and no message is too long."""
    view = memoryview(data).cast("B")
    for start in range(0, view.nbytes, BLOCK_BYTES):
        yield view[start : start + BLOCK_BYTES]


def as_tensor(view: memoryview) -> Tensor:
    """A uint8 tensor of the bytes, which shares their memory if they are writable."""
    import torch

    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def split_carried(ticket: Ticket, data: Buffer) -> dict[str, Buffer]:
    """The files contained in the output of `carried_bytes`, without copying them."""
    files: dict[str, Buffer] = {}
    view, position = memoryview(data).cast("B"), 0
    for name, size in ticket.carried.items():
        files[name], position = view[position : position + size], position + size
    return files


def with_config(ticket: Ticket, folder: Path, carried: Mapping[str, Buffer]) -> dict[str, Buffer]:
    """The adapter's files including the configuration. Raises ModelError if a file's size differs from the ticket's."""
    files = {**carried, CONFIG_FILE: (folder / CONFIG_FILE).read_bytes()}
    for name, size in ticket.files.items():
        if memoryview(files[name]).nbytes != size:
            raise ModelError(
                f"{memoryview(files[name]).nbytes} bytes arrived by {ticket.kind}, {size} were published", where=name
            )
    return files
