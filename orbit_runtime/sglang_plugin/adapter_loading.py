"""How an adapter's files enter SGLang's process: from their folder, or from the host's memory.

The same code parses them in both cases, and SGLang takes LoRA's tensors through its own path for tensors that are
already loaded.
"""

from __future__ import annotations

import os
from collections.abc import Buffer, Callable
from pathlib import Path
from typing import Any

from orbit_runtime.adapters.buffer import opened, read_place
from orbit_runtime.adapters.files import CONFIG_FILE, MODEL_FILE, ROTATIONS_FILE
from orbit_runtime.adapters.state import parse_tensors
from orbit_runtime.adapters.ticket import NotArrivedError, Ticket, read_ticket
from orbit_runtime.errors import ModelError


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
    files = {**from_memory(ticket), CONFIG_FILE: (folder / CONFIG_FILE).read_bytes()}
    for name, size in ticket.files.items():
        num_bytes = memoryview(files[name]).nbytes
        if num_bytes != size:
            raise ModelError(f"{num_bytes} bytes arrived by SharedMemory, {size} were published", where=name)
    return files


def from_memory(ticket: Ticket) -> dict[str, Buffer]:
    """Every file but the configuration, mapped, so that all processes share an anonymous file of the trainer."""
    try:
        with opened(ticket.memory, os.O_RDONLY) as descriptor:
            return {name: read_place(descriptor, *ticket.places[name]) for name in ticket.files if name != CONFIG_FILE}
    except OSError as error:
        raise NotArrivedError(f"the memory that held it was released: {error}") from None
    except ValueError as error:
        raise ModelError(f"the memory is not as large as the ticket says: {error}") from None
