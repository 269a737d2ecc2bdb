"""How an adapter's files enter SGLang's process: from their folder, from shared memory, or by broadcast.

The same code parses them in every case, and SGLang takes LoRA's tensors through its own path for tensors that are
already loaded.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Buffer, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from orbit_runtime.adapters.buffer import MemoryOpening, opened, read_place
from orbit_runtime.adapters.files import CONFIG_FILE, MODEL_FILE, ROTATIONS_FILE
from orbit_runtime.adapters.group import BroadcastGroup, join
from orbit_runtime.adapters.state import parse_tensors
from orbit_runtime.adapters.ticket import (
    NotArrivedError,
    Ticket,
    as_tensor,
    blocks,
    read_ticket,
    split_carried,
    with_config,
)
from orbit_runtime.errors import ModelError

_joined: dict[str, BroadcastGroup] = {}
"""The newest generation by name; at most one."""


def files_of(folder: Path) -> dict[str, Buffer]:
    """An OFT adapter's files, from the folder or through its ticket. Raises ModelError or NotArrivedError."""
    ticket = read_ticket(folder)
    if ticket is not None:
        return receive(ticket, folder)
    return {name: (folder / name).read_bytes() for name in (CONFIG_FILE, MODEL_FILE, ROTATIONS_FILE)}


def load_lora(original: Callable[..., None], adapter: Any) -> None:
    """Wraps SGLang's loading from files. SGLang returns errors raised here as its response to the load call."""
    folder = Path(adapter.config.path)
    ticket = read_ticket(folder)
    if ticket is None or ROTATIONS_FILE in ticket.files:
        original(adapter)
        return
    adapter.initialize_weights_from_tensors(parse_tensors(receive(ticket, folder), MODEL_FILE))


def receive(ticket: Ticket, folder: Path) -> dict[str, Buffer]:
    """
    Raises:
        NotArrivedError: the files did not arrive.
        ModelError: their sizes differ from the published ones.
    """
    return with_config(ticket, folder, RECEIVERS[ticket.kind](ticket))


def _from_memory(ticket: Ticket) -> dict[str, Buffer]:
    """An anonymous file, opened through the trainer's descriptor; mapped, so that all processes share it."""
    path, title, places = (ticket.source[name] for name in ("path", "title", "places"))
    try:
        with opened(MemoryOpening(path, title), os.O_RDONLY) as descriptor:
            return {name: read_place(descriptor, *places[name]) for name in ticket.carried}
    except OSError as error:
        raise NotArrivedError(f"the memory that held it was released: {error}") from None
    except ValueError as error:
        raise ModelError(f"the memory is not as large as the ticket says: {error}") from None


def _from_group(ticket: Ticket) -> dict[str, Buffer]:
    name = ticket.source["generation"]
    group = _joined.get(name) or join(ticket.source)
    # A failed group cannot be reused, so it is cached only after it served.
    _joined.clear()
    try:
        sent = group.carries(ticket.source["publish"])
        if sent:
            files = split_carried(ticket, _fresh_memory(ticket.num_bytes))
            for block in (block for file in files.values() for block in blocks(file)):
                group.broadcast(as_tensor(block))
    except RuntimeError as error:
        raise NotArrivedError(error) from None
    _joined[name] = group
    if not sent:
        raise NotArrivedError("its broadcast is over")
    return files


def _fresh_memory(num_bytes: int) -> mmap.mmap:
    """Uses large pages if the system supports them: the kernel clears and maps each on first write."""
    memory = mmap.mmap(-1, max(1, num_bytes))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


RECEIVERS: Mapping[str, Callable[[Ticket], dict[str, Buffer]]] = {
    "SharedMemory": _from_memory,
    "Broadcast": _from_group,
}
