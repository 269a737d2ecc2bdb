"""A ticket: what an engine finds in a folder in place of an adapter's files while their bytes come another way.

    adapter_config.json   as published: the engine reads it before anything else
    transport.json        how the bytes come, and the digests of their pieces

Whatever carried them, what arrived is known by its digests: those of the pieces must add up to the adapter's, and each
piece must have its own.

Belongs here: the ticket, and whether what arrived is what was published. Does not belong here: sending
(`rollout.handover`), receiving (`sglang_plugin.arrival`), the broadcast group (`group`).
"""

from __future__ import annotations

import json
from collections.abc import Buffer, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from orbit_runtime.adapters.state import CONFIG_FILE, pieces_of
from orbit_runtime.digests import Piece, Pieces, first_difference, tree_digest
from orbit_runtime.errors import ModelError
from orbit_runtime.types import AdapterFiles

TICKET_FILE = "transport.json"
NOT_ARRIVED = "the adapter did not arrive"
"""Begins the message of what an adapter that comes as files does not suffer from: the client then sends files."""

BLOCK_BYTES = 1 << 26

Kind = Literal["SharedMemory", "Broadcast"]


class NotArrivedError(Exception):
    """The bytes did not come; nothing is known against them."""

    def __init__(self, why: object) -> None:
        super().__init__(f"{NOT_ARRIVED}: {why}")


@dataclass(frozen=True)
class Ticket:
    """Of one adapter, for every process that loads it."""

    kind: Kind
    digest: str
    """Of all files, the configuration included."""
    files: Mapping[str, Pieces]
    """The digests of each file's pieces, the configuration's too."""
    source: Mapping[str, Any]
    """Where the bytes come from; each kind has its own."""

    @property
    def carried(self) -> Mapping[str, Pieces]:
        """What does not lie in the ticket's folder, in the order in which it comes."""
        return {name: self.files[name] for name in sorted(self.files.keys() - {CONFIG_FILE})}

    @property
    def num_bytes(self) -> int:
        return sum(piece.bytes for pieces in self.carried.values() for piece in pieces)


def write_ticket(folder: Path, adapter: AdapterFiles, kind: Kind, source: Mapping[str, Any]) -> Ticket:
    """Into a new folder."""
    ticket = Ticket(kind, adapter.digest, adapter.pieces or pieces_of(adapter.files), source)
    files = {name: [[piece.bytes, piece.sha256] for piece in pieces] for name, pieces in ticket.files.items()}
    folder.mkdir()
    (folder / CONFIG_FILE).write_bytes(adapter.files[CONFIG_FILE])
    content = {"kind": kind, "digest": ticket.digest, "files": files, "source": source}
    (folder / TICKET_FILE).write_text(json.dumps(content))
    return ticket


def read_ticket(folder: Path) -> Ticket | None:
    """None: this folder holds the files themselves."""
    try:
        content = json.loads((folder / TICKET_FILE).read_bytes())
    except FileNotFoundError:
        return None
    files = {name: tuple(Piece(*each) for each in pieces) for name, pieces in content["files"].items()}
    return Ticket(content["kind"], content["digest"], files, content["source"])


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
    for name, pieces in ticket.carried.items():
        end = position + sum(piece.bytes for piece in pieces)
        files[name], position = view[position:end], end
    return files


def check_arrived(ticket: Ticket, folder: Path, carried: Mapping[str, Buffer]) -> dict[str, Buffer]:
    """The adapter's files, the configuration with them. Raises ModelError where they are not those published."""
    files = {**carried, CONFIG_FILE: (folder / CONFIG_FILE).read_bytes()}
    if tree_digest(ticket.files) != ticket.digest:
        raise ModelError(f"the ticket's pieces do not add up to {ticket.digest}", where=TICKET_FILE)
    for name, pieces in ticket.files.items():
        wrong = first_difference(files[name], pieces)
        if wrong is not None:
            raise ModelError(
                f"what arrived by {ticket.kind} is not {ticket.digest}: piece {wrong} of {len(pieces)} is another one",
                where=name,
            )
    return files
