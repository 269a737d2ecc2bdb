"""Ranks for tests: processes over gloo, one world per layout, that run cases one after the other.

Belongs here: starting them and what they send back. Does not belong here: expectations.
"""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

from orbit_runtime.training.megatron.groups import Groups, GroupSizes, join, leave

Work = Callable[..., Any]
"""(groups, *arguments) → anything that pickles."""


class Failed(Exception):
    """A rank raised; its traceback is the message."""


class _Rank:
    """A process that is a rank of one world after the other: most of a rank's start is importing torch."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()

    def ask(self, question: Any) -> None:
        self.connection.send(question)

    def answer(self, seconds: float = 0) -> Any:
        assert self.connection.poll(seconds), "a rank does not answer"
        return self.connection.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(20)


_SPARE: list[_Rank] = []
"""Processes of worlds that were closed."""


def end_spares() -> None:
    """The next world gets new processes: in those of several worlds, gloo's threads of the earlier ones take time."""
    while _SPARE:
        _SPARE.pop().kill()


class World:
    """Ranks that wait for work."""

    def __init__(self, sizes: GroupSizes) -> None:
        self.sizes = sizes
        self._ranks = [_SPARE.pop() if _SPARE else _Rank() for _ in range(sizes.world)]
        address = f"127.0.0.1:{_free_port()}"
        for number, rank in enumerate(self._ranks):
            rank.ask(("join", (sizes, number, address)))
        self._answers()

    def call(self, work: Work, *arguments: Any) -> list[Any]:
        """Results in the order of ranks."""
        for rank in self._ranks:
            rank.ask(("work", (work, arguments)))
        return self._answers()

    def _answers(self) -> list[Any]:
        """Once a rank has failed, the others may wait for it for ever: they get 20 seconds."""
        waiting, found, failed = dict(enumerate(self._ranks)), dict[int, Any](), None
        while waiting:
            ready = wait([rank.connection for rank in waiting.values()], 20 if failed else 900)
            if not ready:
                for rank in self._ranks:
                    rank.kill()
                raise failed or AssertionError(f"ranks {list(waiting)} do not answer")
            for number in [number for number, rank in waiting.items() if rank.connection in ready]:
                found[number] = waiting.pop(number).answer()
                failed = failed or (found[number] if isinstance(found[number], Failed) else None)
        if failed:
            raise failed
        return [found[number] for number in range(len(self._ranks))]

    def close(self) -> None:
        """Ranks that leave are those of the next world; one that does not answer takes the others with it."""
        try:
            for rank in self._ranks:
                rank.ask(("leave", ()))
            for rank in self._ranks:
                rank.answer(20)
        except (AssertionError, OSError, EOFError):
            for rank in self._ranks:
                rank.kill()
        else:
            _SPARE.extend(self._ranks)


@contextmanager
def world(sizes: GroupSizes) -> Iterator[World]:
    made = World(sizes)
    try:
        yield made
    finally:
        made.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    groups: Groups | None = None
    rank = -1
    while True:
        try:
            kind, given = connection.recv()
        except EOFError:
            return
        try:
            if kind == "join":
                sizes, rank, address = given
                groups = join(sizes, rank, address, seconds=120)
                connection.send(None)
            elif kind == "leave":
                leave()
                connection.send(None)
            else:
                work, arguments = given
                connection.send(work(groups, *arguments))
        except Exception:
            connection.send(Failed(f"rank {rank}: {traceback.format_exc()}"))
