"""Ports that need no token answer programs of this machine, and no page of another site in a browser on it."""

from __future__ import annotations

import asyncio
import threading

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from orbit_runtime.ports.guard import Guard
from orbit_runtime.services.frames import pack
from orbit_runtime.services.host import CALL, SESSION, Host, start_host

HERE = "http://127.0.0.1:8000"


async def answers(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": (await receive())["body"]})


def asked(method: str, headers: dict[str, str], *, path: str = "/update_weights", token: str | None = None) -> int:
    guard = Guard(answers, token=token, body_bytes=100, read_seconds=5.0)

    async def ask() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url=HERE) as client:
            content = b"{}" if method == "POST" else None
            return (await client.request(method, path, headers=headers, content=content)).status_code

    return asyncio.run(ask())


JSON = {"Content-Type": "application/json; charset=utf-8"}


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("POST", JSON, 200),
        ("POST", {}, 200),
        ("POST", {**JSON, "Host": "localhost:8000"}, 200),
        ("POST", {**JSON, "Host": "[::1]:8000"}, 200),
        ("POST", {**JSON, "Origin": HERE}, 200),
        ("POST", {**JSON, "Origin": "http://page.example:9977"}, 403),
        ("POST", {**JSON, "Origin": "http://127.0.0.1:9977"}, 403),
        ("POST", {**JSON, "Origin": "null"}, 403),
        ("POST", {**JSON, "Host": "evil.example"}, 403),
        ("POST", {**JSON, "Host": "127.0.0.1.evil.example:8000"}, 403),
        ("POST", {**JSON, "Host": "[", "Origin": "http://["}, 403),
        ("GET", {"Host": "evil.example:8000"}, 403),
        ("POST", {"Content-Type": "text/plain;charset=UTF-8"}, 415),
        ("POST", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ],
)
def test_without_a_token_only_this_machines_programs_are_answered(
    method: str, headers: dict[str, str], status: int
) -> None:
    assert asked(method, headers) == status
    with_token = {**headers, "Authorization": "Bearer secret"}
    assert asked(method, with_token, token="secret") == 200, "no page knows the token"
    assert asked("GET", headers, path="/health") == 200


def test_a_page_opens_no_session_of_a_trainer_and_reads_no_facts() -> None:
    server = start_host(Host({"kind": "trainer"}, {}, lambda: None), "127.0.0.1", 0, None)
    try:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            assert client.get("/facts").status_code == 200
            for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
                assert client.get("/facts", headers=headers).status_code == 403
                assert client.post("/open", headers=headers, content=b"x").status_code == 403
    finally:
        server.close()


@pytest.mark.parametrize("execution", [float("inf"), float("nan"), "x", None])
def test_an_execution_that_is_no_number_is_400(execution: object) -> None:
    server = start_host(Host({"kind": "trainer"}, {}, lambda: None), "127.0.0.1", 0, None)
    try:
        body = pack({"session": "a", "run": "r", "execution": execution})
        assert httpx.post(f"{server.url}/open", content=body, timeout=30).status_code == 400
    finally:
        server.close()


def test_a_call_whose_number_is_none_is_400() -> None:
    host, stopped = Host({"kind": "trainer"}, {"add": lambda: None}, lambda: None), threading.Event()
    server = start_host(host, "127.0.0.1", 0, None)
    worker = threading.Thread(target=host.work, args=(stopped.is_set,))
    worker.start()
    try:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            body = pack({"session": "a", "run": "r", "execution": 1})
            assert client.post("/open", content=body).status_code == 200
            for number in ("²".encode("latin-1"), b"9" * 5000, b"-1", b"", b"1e999"):
                headers = [(SESSION.encode(), b"a"), (CALL.encode(), number)]
                assert client.post("/call/add", content=pack([]), headers=headers).status_code == 400
            headers = [(SESSION.encode(), b"a"), (CALL.encode(), b"1")]
            assert client.post("/call/add", content=pack([]), headers=headers).status_code == 200
    finally:
        stopped.set()
        worker.join()
        server.close()
