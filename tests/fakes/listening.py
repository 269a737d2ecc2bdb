"""HTTP of the fakes: a `FakeServer`'s answers over real connections, whole or bit by bit.

Belongs here: sockets. Does not belong here: what is answered (`fake_servers`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fakes.fake_servers import FakeServer


@dataclass
class Events:
    """An answer that comes bit by bit. A `str` is sent as it is, a number is a pause in seconds; `whole=False` cuts the
    connection after the last, without an end."""

    events: Iterable[dict | str | float]
    whole: bool = True


def send_events(handler: BaseHTTPRequestHandler, content: Events, fake: FakeServer) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    whole = content.whole
    try:
        for event in content.events:
            if isinstance(event, float):
                handler.wfile.flush()
                time.sleep(event)
                if not fake.is_alive():
                    raise ConnectionError
            else:
                _send_chunk(handler, event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n")
        if whole:
            _send_chunk(handler, "data: [DONE]\n\n")
            handler.wfile.write(b"0\r\n\r\n")
        handler.wfile.flush()
    except ConnectionError:
        whole = False
    if not whole:
        handler.close_connection = True
        handler.connection.close()


def _send_chunk(handler: BaseHTTPRequestHandler, text: str) -> None:
    content = text.encode()
    handler.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")


def listen(fake: FakeServer) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body in one packet: in two, each answer waits 40 ms for the other side's acknowledgement.
        wbufsize = -1

        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body: dict) -> None:
            wanted = None if fake.key is None else f"Bearer {fake.key}"
            if wanted and self.path != "/health" and self.headers["Authorization"] != wanted:
                self._send(401, {"error": "Unauthorized"})
                return
            fake.headers_seen.append(dict(self.headers))
            if self.path in ("/generate", "/v1/completions"):
                time.sleep(fake.delay)
                while fake.hangs and fake.is_alive():
                    time.sleep(0.02)
            status, content = fake.answer(self.path, body)
            if status < 0 or not fake.is_alive():
                self.close_connection = True
                self.connection.close()
                return
            if isinstance(content, Iterator):
                content = Events(content)
            if isinstance(content, Events):
                send_events(self, content, fake)
            else:
                self._send(status, content)

        def _send(self, status: int, content: Any) -> None:
            sent = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            if 300 <= status < 400:
                self.send_header("Location", content["location"])
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server
