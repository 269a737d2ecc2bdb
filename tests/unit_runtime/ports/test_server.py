"""What holds on every port before a request is read: limits on its head and its time, and on connections."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from orbit_runtime.observability.metrics import RunMetrics
from orbit_runtime.observability.server import listen, start_server
from orbit_runtime.observability.status import LiveStatus
from orbit_runtime.ports.guard import Guard
from orbit_runtime.ports.server import HEAD_BYTES, HEAD_LINES, build_server
from orbit_runtime.services.host import Host, start_host
from orbit_runtime.workers.servers.agent import Agent, build_app

FLOOD = 57_000_000
"""Bytes of headers that once took 1.7 GB of memory."""
TOLD = b"POST / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"


@contextmanager
def served(app: Any, **limits: Any) -> Iterator[int]:
    """An ASGI application as every port serves it. Yields its port."""
    listener = listen("127.0.0.1", 0, "here", "")
    server = build_server(app, **limits)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.002)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


async def answers(scope: Any, receive: Any, send: Any) -> None:
    """The guard has read the body; `/slow` takes a second."""
    if scope["path"] == "/slow":
        await asyncio.sleep(1.0)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def guarded() -> Guard:
    return Guard(answers, token="secret")


@contextmanager
def status_port(_: Path) -> Iterator[int]:
    with closing(start_server(LiveStatus("a"), RunMetrics(run="a"))) as server:
        yield server.port


@contextmanager
def side_port(_: Path) -> Iterator[int]:
    with closing(start_host(Host({"kind": "trainer"}, {}, lambda: None), "127.0.0.1", 0, "secret")) as server:
        yield server.port


@contextmanager
def agent_port(folder: Path) -> Iterator[int]:
    with served(build_app(Agent(folder, "secret"), "secret")) as port:
        yield port


def exchange(port: int, *parts: bytes, seconds: float = 30.0) -> bytes:
    """What is answered until the connection is closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        with suppress(ConnectionError):
            for part in parts:
                connection.sendall(part)
        found = b""
        with suppress(ConnectionError):
            while piece := connection.recv(1 << 16):
                found += piece
        return found


def flood(port: int, first: bytes) -> int:
    """Bytes of a head without an end that a port takes."""
    sent = 0
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(first)
        with suppress(ConnectionError):
            while sent < FLOOD:
                sent += connection.send(b"a:\r\n" * (1 << 14))
    return sent


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize("port_of", [status_port, side_port, agent_port])
def test_a_head_has_limits_on_every_port_before_any_token(port_of: Callable[[Path], Any], tmp_path: Path) -> None:
    first = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    with port_of(tmp_path) as port:
        many = b"".join(b"a%d:\r\n" % at for at in range(HEAD_LINES + 1))
        assert status_of(exchange(port, first + many + b"\r\n")) == 431
        assert status_of(exchange(port, first + b"a: " + b"x" * HEAD_BYTES + b"\r\n\r\n")) == 431
        assert status_of(exchange(port, b"GET /" + b"x" * HEAD_BYTES + b" HTTP/1.1\r\n\r\n")) == 431
        assert flood(port, first) < FLOOD, "a head that never ends is not read on"
        few = b"".join(b"a%d: %s\r\n" % (at, b"x" * 400) for at in range(HEAD_LINES - 2))
        ended = exchange(port, first + few + b"Connection: close\r\n\r\n")
        assert status_of(ended) in (200, 401, 404), "a head below the limits is read"


def test_trailers_of_a_body_have_the_limits_of_a_head() -> None:
    first = TOLD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    with served(guarded()) as port:
        body = b"5\r\nhello\r\n0\r\n"
        assert status_of(exchange(port, first + body + b"T: x\r\n\r\n")) == 200
        assert status_of(exchange(port, first + body, *[b"a:\r\n" * 1000] * 5)) == 431
        assert status_of(exchange(port, first + body + b"T: ", *[b"x" * (1 << 16)] * 20)) == 431


def test_requests_that_follow_each_other_are_not_counted_together() -> None:
    body = b"x" * 200_000
    head = b"POST / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nA: %s\r\n" % (b"y" * 30_000)
    request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    last = head + b"Connection: close\r\nContent-Length: 0\r\n\r\n"
    with served(guarded()) as port:
        assert exchange(port, *[request] * 4, last).count(b"HTTP/1.1 200") == 5


def test_a_head_that_does_not_arrive_ends_its_connection() -> None:
    whole = b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n\r\n"
    with served(guarded(), head_seconds=0.3) as port:
        for parts in ([], [b"\r\n"], [b"GET /health HTTP/1.1\r\n"], [b"GET /health HTTP/1.1\r\nA: b"]):
            assert status_of(exchange(port, *parts)) == 408
        second = exchange(port, whole + b"GET / HTTP/1.1\r\n")
        assert second.startswith(b"HTTP/1.1 200")
        assert b"HTTP/1.1 408" in second


def test_a_slow_answer_is_not_taken_for_a_slow_head() -> None:
    """Some clients send a line end after a body, and some the head of their next request."""
    head = TOLD.replace(b"/", b"/slow", 1) + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}"
    with served(guarded(), head_seconds=0.3) as port:
        for rest in (b"", b"\r\n", b"GET / HTTP/1.1\r\n"):
            assert exchange(port, head + rest).startswith(b"HTTP/1.1 200")


def test_one_address_cannot_take_all_connections() -> None:
    with served(guarded(), most=4, head_seconds=60.0) as port, ExitStack() as held:
        for _ in range(4):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            connection.sendall(b"GET /health HTTP/1.1\r\n")
        time.sleep(0.2)
        assert status_of(exchange(port)) == 429
        assert status_of(exchange(port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")) == 429
        with httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2"), timeout=30) as other:
            assert other.get(f"http://127.0.0.1:{port}/health").status_code == 200
        held.close()
        deadline = time.monotonic() + 30
        while httpx.get(f"http://127.0.0.1:{port}/health", timeout=30).status_code == 429:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_the_port_of_a_run_answers_no_page_of_another_site() -> None:
    server = start_server(LiveStatus("a"), RunMetrics(run="a"))
    try:
        for path in ("metrics", "status", "healthz", "readyz"):
            assert httpx.get(f"{server.url}/{path}", timeout=30).status_code != 403
            for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
                assert httpx.get(f"{server.url}/{path}", headers=headers, timeout=30).status_code == 403
    finally:
        server.close()


def test_an_agent_reads_no_large_body_of_who_has_no_token(tmp_path: Path) -> None:
    with agent_port(tmp_path) as port:
        large = {"arguments": ["x"], "environment": {"A": "x" * (1 << 21)}}
        url = f"http://127.0.0.1:{port}/servers/replica-0"
        assert httpx.put(url, json=large, timeout=30).status_code == 401
        assert httpx.put(url, json=large, headers={"Authorization": "Bearer secret"}, timeout=30).status_code == 413
