"""Ports for servers that take minutes to come to listening.

Belongs here: keeping a port for one's own server. Does not belong here: listening.
"""

from __future__ import annotations

import socket
from types import TracebackType


class HeldPort:
    """A free port of the loopback device that the system gives to nobody else as long as this is open.

    A server that sets SO_REUSEADDR, as asyncio's, uvicorn's and SGLang's do, can bind it meanwhile: the socket that
    holds it does not listen. Without it, a process that asks for any free port, such as a rank, may get the one that a
    server was told to use and has not bound yet.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number = int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Safe to call twice."""
        self._socket.close()

    def __enter__(self) -> int:
        return self.number

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
