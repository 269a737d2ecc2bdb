"""A port that is held for a server which binds it later."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
import sys

import pytest

from orbit_runtime.workers.ports import HeldPort

IP_LOCAL_PORT_RANGE = 51
"""Of Linux 6.3, which Python does not name: the ports that this socket may be given."""


def test_a_server_listens_on_it_while_it_is_held_and_answers_after_it_was_let_go() -> None:
    async def talk() -> bytes:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"here")
            writer.close()

        with HeldPort() as port:
            server = await asyncio.start_server(answer, "127.0.0.1", port)
        async with server:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            said = await reader.read()
            writer.close()
        return said

    assert asyncio.run(talk()) == b"here"


@pytest.mark.parametrize("reuses", [False, True])
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_nobody_who_asks_for_any_port_is_given_it(address: str, reuses: bool) -> None:
    if sys.platform != "linux":
        pytest.skip("a socket's range of ports can be narrowed on Linux only")
    with HeldPort() as port, socket.socket() as other:
        if reuses:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port | port << 16))
        except OSError:
            pytest.skip("this kernel is older than 6.3: a socket's range of ports cannot be narrowed")
        with pytest.raises(OSError, match="Address already in use") as caught:
            other.bind((address, 0))
        assert caught.value.errno == errno.EADDRINUSE


def test_two_ports_that_are_held_differ_and_one_that_was_let_go_can_be_had() -> None:
    first, second = HeldPort(), HeldPort()
    assert first.number != second.number
    first.close()
    first.close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", first.number))
    second.close()
