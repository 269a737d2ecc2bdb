"""A broadcast group of our own: the trainer, and every process of every server that loads adapters.

Built from torch's components without touching the default group, because SGLang has its own. Gloo on the host, even
with GPUs: SGLang keeps adapters in host memory, and NCCL's watchdog would terminate a server whose peer died.

A generation is a group with fixed members. A failed member ends it for all; the trainer then opens another.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

from orbit_runtime.adapters.ticket import NotArrivedError

CONNECT_SECONDS = 5.0
POLL_SECONDS = 0.005
NOW = "now"


class BroadcastGroup:
    """One generation, as seen by one of its processes. For use by one thread at a time."""

    def __init__(self, store: Store, rank: int, size: int, host: str, seconds: float) -> None:
        """Args: host: this process's own address, at which the others reach it."""
        self._store = store
        self._timeout = timedelta(seconds=seconds)
        options = ProcessGroupGloo._Options()
        options._timeout = self._timeout
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        self._group = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)

    def carries(self, publish: str) -> bool:
        """Whether the trainer is sending this publish now; if not, nothing will arrive. Raises RuntimeError."""
        return self._store.check([NOW]) and self._store.get(NOW) == publish.encode()

    def broadcast(self, data: Tensor) -> None:
        """Broadcasts rank 0's `data` to the others, on the CPU. Raises RuntimeError, which ends the generation."""
        self._group.broadcast([data]).wait(self._timeout)


class BroadcastOpening:
    """The trainer's side: a store that members find, and rank 0 of the group."""

    def __init__(self, host: str, members: int, seconds: float) -> None:
        """
        Args:
            host: the only address to listen at.
            members: number of processes in addition to this one.
            seconds: maximum duration of any operation.
        """
        self._host, self._size, self._seconds = host, 1 + members, seconds
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        server = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=seconds),
        )  # fmt: skip
        name = secrets.token_hex(16)
        self._store: Store | None = PrefixStore(name, server)
        self.source = {"host": host, "port": port, "generation": name, "size": self._size, "seconds": seconds}
        """The fields that a member needs in order to join."""

    def wait(self, is_over: Callable[[], bool]) -> BroadcastGroup:
        """Waits until all have joined. Raises NotArrivedError if they do not in time, or once `is_over` is true."""
        assert self._store is not None
        until = time.monotonic() + self._seconds
        while (joined := self._store.add("joined", 0)) < self._size - 1:
            if is_over() or time.monotonic() > until:
                raise NotArrivedError(f"{joined} of {self._size - 1} processes joined")
            time.sleep(POLL_SECONDS)
        self._store.set("open", "")
        return BroadcastGroup(self._store, 0, self._size, self._host, self._seconds)

    def announce(self, publish: str) -> None:
        """Sets the publish that is sent from now on; empty for none."""
        if self._store is not None:
            self._store.set(NOW, publish)

    def close(self) -> None:
        """Members that wait for others to join get an error at once."""
        self._store = None


def join(source: Mapping[str, Any]) -> BroadcastGroup:
    """A member's side; it takes the next free rank. Raises NotArrivedError."""
    host, port, size, seconds = source["host"], source["port"], source["size"], source["seconds"]
    try:
        with socket.create_connection((host, port), CONNECT_SECONDS) as connection:
            here = connection.getsockname()[0]
        server = TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=CONNECT_SECONDS)
        )
        store = PrefixStore(source["generation"], server)
        rank = store.add("joined", 1)
        if rank >= size:
            raise NotArrivedError(f"all {size} places of the generation are taken")
        until = time.monotonic() + seconds
        while not store.check(["open"]):
            if time.monotonic() > until:
                raise NotArrivedError("the other processes did not join")
            time.sleep(POLL_SECONDS)
        return BroadcastGroup(store, rank, size, here, seconds)
    except (OSError, RuntimeError) as error:
        raise NotArrivedError(f"the generation of {host}:{port} is over: {error}") from None
