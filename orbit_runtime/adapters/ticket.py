"""A ticket: what an engine finds in a folder in place of an adapter's files while their bytes come another way.

    adapter_config.json   as published: the engine reads it before anything else
    transport.json        how the bytes come, and the size of each file

What arrived is not hashed here, as files that are read are not either: the proof of the publish reads what stands in
the slots back, and its digest must be the published one whatever carried the bytes (decision 106).

Belongs here: the ticket, and what of an adapter goes beside it. Does not belong here: sending (`rollout.handover`),
receiving (`sglang_plugin.arrival`), the broadcast group (`group`).
"""

from __future__ import annotations

import json
from collections.abc import Buffer, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from orbit_runtime.adapters.files import CONFIG_FILE
from orbit_runtime.errors import ModelError
from orbit_runtime.types import AdapterFiles

TICKET_FILE = "transport.json"
NOT_ARRIVED = "the adapter did not arrive"
"""Begins the message of what an adapter that comes as files does not suffer from: the client then sends files."""

BLOCK_BYTES = 1 << 22
"""Of one message, so that both sides work in their caches: with 64 MiB it took nearly twice as long."""

Kind = Literal["SharedMemory", "Broadcast"]


class NotArrivedError(Exception):
    """The bytes did not come; nothing is known against them."""

    def __init__(self, why: object) -> None:
        super().__init__(f"{NOT_ARRIVED}: {why}")


@dataclass(frozen=True)
class Ticket:
    """Of one adapter, for every process that loads it."""

    kind: Kind
    files: Mapping[str, int]
    """Bytes of each file, the configuration's too."""
    source: Mapping[str, Any]
    """Where the bytes come from; each kind has its own."""

    @property
    def carried(self) -> Mapping[str, int]:
        """What does not lie in the ticket's folder, in the order in which it comes."""
        return {name: self.files[name] for name in sorted(self.files.keys() - {CONFIG_FILE})}

    @property
    def num_bytes(self) -> int:
        return sum(self.carried.values())


def write_ticket(folder: Path, adapter: AdapterFiles, kind: Kind, source: Mapping[str, Any]) -> Ticket:
    """Into a new folder."""
    ticket = Ticket(kind, {name: memoryview(data).nbytes for name, data in adapter.files.items()}, source)
    folder.mkdir()
    (folder / CONFIG_FILE).write_bytes(adapter.files[CONFIG_FILE])
    (folder / TICKET_FILE).write_text(json.dumps({"kind": kind, "files": ticket.files, "source": source}))
    return ticket


def read_ticket(folder: Path) -> Ticket | None:
    """None: this folder holds the files themselves."""
    try:
        content = json.loads((folder / TICKET_FILE).read_bytes())
    except FileNotFoundError:
        return None
    return Ticket(content["kind"], content["files"], content["source"])


def carried_bytes(adapter: AdapterFiles) -> Iterator[Buffer]:
    """What goes, one file after the other."""
    yield from (adapter.files[name] for name in sorted(adapter.files.keys() - {CONFIG_FILE}))


def blocks(data: Buffer) -> Iterator[memoryview]:
    """A file in the runs in which it is broadcast: both sides cut alike, and no message is too long."""
    view = memoryview(data).cast("B")
    for start in range(0, view.nbytes, BLOCK_BYTES):
        yield view[start : start + BLOCK_BYTES]


def as_tensor(view: memoryview) -> Tensor:
    """Its bytes, without copying them where they may be written."""
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def split_carried(ticket: Ticket, data: Buffer) -> dict[str, Buffer]:
    """The files in what `carried_bytes` gave, without copying them."""
    files: dict[str, Buffer] = {}
    view, position = memoryview(data).cast("B"), 0
    for name, size in ticket.carried.items():
        files[name], position = view[position : position + size], position + size
    return files


def with_config(ticket: Ticket, folder: Path, carried: Mapping[str, Buffer]) -> dict[str, Buffer]:
    """The adapter's files, the configuration with them. Raises ModelError where one is longer or shorter than told."""
    files = {**carried, CONFIG_FILE: (folder / CONFIG_FILE).read_bytes()}
    for name, size in ticket.files.items():
        if memoryview(files[name]).nbytes != size:
            raise ModelError(
                f"{memoryview(files[name]).nbytes} bytes arrived by {ticket.kind}, {size} were published", where=name
            )
    return files
