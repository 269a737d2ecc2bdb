"""A real SGLang server whose events arrive twice or not at all: no token counts twice, none is missing, or it is said.

Between it and the engine stands a relay of the test's, which hands on what both say, but for one event of a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest

from orbit_runtime.errors import GateError
from orbit_runtime.rollout.requests import sample
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.types import Request, Sampling
from tests.engines.servers import Adder, attach, server_of

Deal = Callable[[int, bytes], list[bytes]]
"""Number and text of an event of a stream of samples → what is handed on in its place."""


class Relay:
    def __init__(self, url: str) -> None:
        self.deal: Deal = lambda _, event: [event]
        relay = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                relay.pass_on(self, url)

            do_POST = do_GET

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        Thread(target=self._http.serve_forever, daemon=True).start()

    def pass_on(self, asked: BaseHTTPRequestHandler, url: str) -> None:
        body = asked.rfile.read(int(asked.headers.get("Content-Length", 0)))
        headers = {name: asked.headers[name] for name in ("Authorization", "Content-Type") if asked.headers[name]}
        with (
            httpx.Client(timeout=60, trust_env=False) as client,
            client.stream(asked.command, f"{url}{asked.path}", content=body, headers=headers) as answer,
        ):
            asked.send_response(answer.status_code)
            asked.send_header("Content-Type", answer.headers.get("content-type", "application/json"))
            asked.end_headers()
            if "event-stream" not in answer.headers.get("content-type", ""):
                asked.wfile.write(answer.read())
                return
            events = (line for line in answer.iter_lines() if line)
            for number, event in enumerate(events):
                for each in self.deal(number, event.encode()):
                    asked.wfile.write(each + b"\n\n")

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def relay(lora_server: ServedEngine) -> Iterator[Relay]:
    made = Relay(server_of(lora_server).url)
    yield made
    made.close()


@pytest.fixture
def engine(relay: Relay, lora_server: ServedEngine, lora_adder: Adder, tmp_path: Path) -> Iterator[ServedEngine]:
    made = attach(lora_adder, [relay.url], tmp_path, "Folder", server_of(lora_server).headers)
    yield made
    made.close()


def answers(engine: ServedEngine, adder: Adder) -> list[int]:
    """Lengths. Events hold 64 tokens each, so that there are three of them."""
    prompt = tuple(adder[1].encode_chat([{"role": "user", "content": "12+34="}]))
    asked = Request(0, 0, prompt, Sampling(max_new_tokens=160, ignore_eos=True), None)
    return [len(each.token_ids_T) for each in sample(engine, [asked])]


def of_event(number: int, times: int) -> Deal:
    """Event `number` is handed on so many times."""
    return lambda found, event: [event] * (times if found == number else 1)


@pytest.mark.parametrize("number", [0, 1])
def test_an_event_that_comes_twice_stops_the_run(
    engine: ServedEngine, relay: Relay, lora_adder: Adder, number: int
) -> None:
    assert answers(engine, lora_adder) == [160]
    relay.deal = of_event(number, 2)
    with pytest.raises(GateError, match=r"counts \d+ tokens of request 0, but told \d+: .*came twice") as caught:
        answers(engine, lora_adder)
    assert caught.value.exit_code == 84


def test_an_event_that_is_missing_stops_the_run(engine: ServedEngine, relay: Relay, lora_adder: Adder) -> None:
    relay.deal = of_event(1, 0)
    with pytest.raises(GateError, match=r"counts \d+ tokens of request 0, but told \d+: some are missing"):
        answers(engine, lora_adder)


def test_where_the_last_event_is_missing_the_rest_is_asked_for_again(
    engine: ServedEngine, relay: Relay, lora_adder: Adder
) -> None:
    lost: list[bytes] = []

    def lose_once(_: int, event: bytes) -> list[bytes]:
        if b'"finish_reason":{' in event.replace(b" ", b"") and not lost:
            lost.append(event)
            return []
        return [event]

    relay.deal = lose_once
    assert answers(engine, lora_adder) == [160]
    assert lost
