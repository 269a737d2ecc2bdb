"""Messages in a stream of bytes: each is 4 bytes of length, big-endian, then its body."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # A reward worker, which reads by blocking, starts without it.
    import asyncio

HEADER = 4


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(HEADER, "big") + body


def read_frame(read: Callable[[int], bytes]) -> bytes | None:
    """The next body, or None at the end of the stream. Args: read: blocks until it has so many bytes, or the stream
    ends."""
    header = read(HEADER)
    if len(header) < HEADER:
        return None
    size = int.from_bytes(header, "big")
    body = read(size)
    return body if len(body) == size else None


async def receive_frame(reader: asyncio.StreamReader) -> bytes:
    """The next body. Raises asyncio.IncompleteReadError at the end of the stream."""
    return await reader.readexactly(int.from_bytes(await reader.readexactly(HEADER), "big"))


class Frames:
    """Bodies out of bytes that arrive in any pieces."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that are complete with this piece."""
        self._unread += data
        found, start = [], 0
        while len(self._unread) >= start + HEADER:
            begin = start + HEADER
            end = begin + int.from_bytes(self._unread[start:begin], "big")
            if len(self._unread) < end:
                break
            found.append(bytes(self._unread[begin:end]))
            start = end
        del self._unread[:start]
        return found
