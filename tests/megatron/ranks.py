"""Ranks for tests: processes over gloo, one world per layout, that run cases one after the other.

Belongs here: starting them and what they send back. Does not belong here: expectations.
"""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from orbit_runtime.training.megatron.groups import Groups, Sizes, join, leave

Work = Callable[..., Any]
"""(groups, *arguments) → anything that pickles."""


class Failed(Exception):
    """A rank raised; its traceback is the message."""


class World:
    """Ranks that wait for work."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        context = multiprocessing.get_context("spawn")
        address = f"127.0.0.1:{_free_port()}"
        pipes = [context.Pipe() for _ in range(sizes.world)]
        self._connections = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(theirs, sizes, rank, address), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def call(self, work: Work, *arguments: Any) -> list[Any]:
        """Results in the order of ranks."""
        for connection in self._connections:
            connection.send((work, arguments))
        results = [self._receive(connection) for connection in self._connections]
        for found in results:
            if isinstance(found, Failed):
                raise found
        return results

    def _receive(self, connection: Connection) -> Any:
        assert connection.poll(300), "a rank does not answer"
        return connection.recv()

    def close(self) -> None:
        for connection in self._connections:
            connection.send(None)
        for process in self._processes:
            process.join(20)
            process.kill()


@contextmanager
def world(sizes: Sizes) -> Iterator[World]:
    made = World(sizes)
    try:
        yield made
    finally:
        made.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(connection: Connection, sizes: Sizes, rank: int, address: str) -> None:
    import torch

    torch.set_num_threads(1)
    groups: Groups = join(sizes, rank, address, seconds=120)
    while (asked := connection.recv()) is not None:
        work, arguments = asked
        try:
            connection.send(work(groups, *arguments))
        except Exception:
            connection.send(Failed(f"rank {rank}: {traceback.format_exc()}"))
    leave()
