"""The stream between front and engine: records arrive whole, in order and at once, however the bytes were cut."""

from __future__ import annotations

import asyncio
import socket

import pytest

from orbit_runtime.serve.channel import Abort, Line, Stop

RECORDS = [Abort((1, 2)), Stop(2.5), Abort(tuple(range(5000))), Abort(())]


class Bytes(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True


def sent(records: list[object]) -> bytes:
    transport = Bytes()
    line = Line(lambda _: None, lambda: None)
    line.connection_made(transport)
    for record in records:
        line.send(record)
    return transport.written


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000, 1 << 20])
def test_records_are_whole_and_in_order_however_the_bytes_are_cut(size: int) -> None:
    heard: list[object] = []
    line = Line(heard.append, lambda: None)
    data = sent(RECORDS)
    for start in range(0, len(data), size):
        line.data_received(data[start : start + size])
    assert heard == RECORDS


def test_a_record_is_heard_with_its_last_byte_and_not_before() -> None:
    heard: list[object] = []
    line = Line(heard.append, lambda: None)
    data = sent(RECORDS[:1])
    line.data_received(data[:-1])
    assert heard == []
    line.data_received(data[-1:])
    assert heard == RECORDS[:1]


def test_nothing_is_sent_to_a_side_that_has_ended_or_is_not_there_yet() -> None:
    transport, line = Bytes(), Line(lambda _: None, lambda: None)
    line.send(RECORDS[0])
    line.connection_made(transport)
    line.close()
    line.send(RECORDS[0])
    assert transport.written == b""


def test_both_ends_over_a_socket_and_the_end_of_one_is_told_once() -> None:
    async def talk() -> tuple[list[object], int]:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        heard: list[object] = []
        ends: list[None] = []

        def gone() -> None:
            ends.append(None)
            ended.set()

        mine, theirs = socket.socketpair()
        speaking, hearing = Line(lambda _: None, lambda: None), Line(heard.append, gone)
        await loop.create_connection(lambda: speaking, sock=mine)
        await loop.create_connection(lambda: hearing, sock=theirs)
        for record in RECORDS:
            speaking.send(record)
        # What was sent before still arrives.
        speaking.close()
        await asyncio.wait_for(ended.wait(), 30)
        return heard, len(ends)

    assert asyncio.run(talk()) == (RECORDS, 1)
