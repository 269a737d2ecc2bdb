"""How an adapter's files come into SGLang's process: from their folder, from shared memory, or by broadcast.

However they come, they are checked and parsed by the same code, and SGLang takes LoRA's tensors by its own way for
tensors that are there already.

Belongs here: receiving. Does not belong here: sending (`rollout.handover`), what OFT makes of the files (`rotation`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch

from orbit_runtime.adapters.group import Group, join
from orbit_runtime.adapters.state import CONFIG_FILE, MODEL_FILE, ROTATIONS_FILE, parse_tensors
from orbit_runtime.adapters.ticket import NotArrivedError, Ticket, read_payload, read_ticket

_joined: dict[str, Group] = {}
"""The newest generation by its name; there is one at most."""


def files_of(folder: Path) -> dict[str, bytes]:
    """An OFT adapter's files, from the folder or by its ticket. Raises ModelError or NotArrivedError."""
    ticket = read_ticket(folder)
    if ticket is not None:
        return receive(ticket, folder)
    return {name: (folder / name).read_bytes() for name in (CONFIG_FILE, MODEL_FILE, ROTATIONS_FILE)}


def load_lora(original: Callable[..., None], adapter: Any) -> None:
    """Around SGLang's loading from files. What is raised here SGLang answers to the load call."""
    folder = Path(adapter.config.path)
    ticket = read_ticket(folder)
    if ticket is None or ROTATIONS_FILE in ticket.sizes:
        original(adapter)
        return
    adapter.initialize_weights_from_tensors(parse_tensors(receive(ticket, folder), MODEL_FILE))


def receive(ticket: Ticket, folder: Path) -> dict[str, bytes]:
    """
    Raises:
        NotArrivedError: they did not come.
        ModelError: they are not what was published.
    """
    with RECEIVERS[ticket.kind](ticket) as stream:
        return read_payload(ticket, folder, stream)


def _from_memory(ticket: Ticket) -> BinaryIO:
    """A file without a name, through the trainer's open descriptor of it."""
    path, title = ticket.source["path"], ticket.source["title"]
    try:
        # The number may stand for another file by now, even for one on which reading waits.
        stream = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    except OSError as error:
        raise NotArrivedError(f"the memory that held it was given back: {error}") from None
    if os.readlink(f"/proc/self/fd/{stream.fileno()}") != title:
        stream.close()
        raise NotArrivedError("the memory that held it was given back")
    return stream


def _from_group(ticket: Ticket) -> BinaryIO:
    name = ticket.source["generation"]
    group = _joined.get(name) or join(ticket.source)
    # One that fails is over, so it is kept only after it served.
    _joined.clear()
    data = torch.empty(ticket.num_bytes, dtype=torch.uint8)
    try:
        sent = group.carries(ticket.source["publish"])
        if sent:
            group.broadcast(data)
    except RuntimeError as error:
        raise NotArrivedError(error) from None
    _joined[name] = group
    if not sent:
        raise NotArrivedError("its broadcast is over")
    return BytesIO(data.numpy())


RECEIVERS: Mapping[str, Callable[[Ticket], BinaryIO]] = {"SharedMemory": _from_memory, "Broadcast": _from_group}
