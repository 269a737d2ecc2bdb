"""Stands in for the interpreter of SGLang: a real uvicorn whose port another process took before it came to listening.

Like SGLang it does not end when that fails, because its schedulers' threads go on. The file `taken` in the folder of
the environment variable `PLAYED_FOLDER` holds the number of starts whose port is taken. The file `foreign` holds what
the other process is: `silent` never answers, `open` is a server that says 200 to everything, `closed` says it to
/health alone and refuses everything else, as a server with another token does.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request, Response

from orbit_runtime.workers.child.run_token import token_from_pipe

app = FastAPI()
TOKEN = token_from_pipe()


@app.get("/health")
def _health() -> str:
    return "up"


@app.get("/v1/models")
def _models(request: Request) -> Response:
    return Response(status_code=200 if request.headers.get("Authorization") == f"Bearer {TOKEN}" else 401)


class Open(BaseHTTPRequestHandler):
    """A server of somebody else's."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")


class Closed(Open):
    def do_GET(self) -> None:
        if self.path == "/health":
            super().do_GET()
            return
        self.send_error(401)


def _take(port: int) -> object:
    kind = Path(os.environ["PLAYED_FOLDER"], "foreign").read_text()
    if kind == "silent":
        return socket.create_server(("127.0.0.1", port))
    # Of one thread: an interpreter whose main thread has ended starts no more.
    other = HTTPServer(("127.0.0.1", port), Open if kind == "open" else Closed)
    threading.Thread(target=other.serve_forever).start()
    return other


def main() -> None:
    port = int(sys.argv[sys.argv.index("--port") + 1])
    left = Path(os.environ["PLAYED_FOLDER"]) / "taken"
    if (times := int(left.read_text())) > 0:
        left.write_text(str(times - 1))
        # Kept open until this process is killed, as by any process that listens.
        globals()["other"] = _take(port)
    threading.Thread(target=time.sleep, args=(600,)).start()
    uvicorn.run(app, host="127.0.0.1", port=port)


main()
