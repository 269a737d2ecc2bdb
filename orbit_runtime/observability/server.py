"""The port of a run: `/metrics`, `/status`, `/healthz`, `/readyz`, `/report`; and HTTP in a daemon thread for any port.

Belongs here: HTTP over `LiveStatus` and `RunMetrics`, listening, starting and stopping an application's server.
Does not belong here: the content of the responses.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from orbit_runtime.errors import OutputError
from orbit_runtime.observability.metrics import RunMetrics
from orbit_runtime.observability.status import LiveStatus
from orbit_runtime.ports.guard import LOOPBACK, Guard, foreign, local_host

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI, Request, Response

    from orbit_runtime.observability.live import LivePage

LISTEN_FIX = "choose another port, 0 for any that is free, and an address of this machine"
"""The fix for a port that `--listen` names."""
BIND_VARIABLE = "ORBIT_BIND_ADDRESS"
_START_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class HTTPServer:
    """A running server. `close()` may be called twice."""

    host: str
    port: int
    _server: uvicorn.Server
    _thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://{local_host(self.host)}:{self.port}"

    def close(self, seconds: float = 5.0) -> None:
        """Accepts no more connections, and gives requests in flight this long to finish."""
        self._server.should_exit = True
        self._thread.join(timeout=seconds)


def build_app(status: LiveStatus, metrics: RunMetrics, live: LivePage | None = None) -> FastAPI:
    """The routes. Liveness and readiness answer 503 with the reason if the run is not live or ready.

    Args: live: the run's page, only for readers on this machine: it shows prompts and answers, not just numbers.
    """
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse, Response

    app = FastAPI(title="orbit run", docs_url=None, redoc_url=None, openapi_url=None)

    # In its own thread: it may wait for the engine's servers, while the other routes must not.
    @app.get("/metrics")
    def _metrics() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/status")
    async def _status() -> JSONResponse:
        return JSONResponse(status.snapshot())

    @app.get("/healthz")
    async def _healthz() -> JSONResponse:
        return _judgement(*status.is_live())

    @app.get("/readyz")
    async def _readyz() -> JSONResponse:
        return _judgement(*status.is_ready())

    if live is not None:
        app.add_route("/", _to_report)
        app.add_route("/report", partial(_page, live))
        app.add_route("/report/rollouts", partial(_rollouts, live))

    def _judgement(ok: bool, reason: str | None) -> JSONResponse:
        return JSONResponse({"ok": ok, "reason": reason}, status_code=200 if ok else 503)

    return app


async def _to_report(_: Request) -> Response:
    from fastapi.responses import RedirectResponse

    return RedirectResponse("report")


async def _page(live: LivePage, request: Request) -> Response:
    return await _answer(request, live.page, "text/html; charset=utf-8")


async def _rollouts(live: LivePage, request: Request) -> Response:
    """`?step=12&from=0`."""
    from fastapi.responses import PlainTextResponse

    step, start = (request.query_params.get(name, default) for name, default in (("step", ""), ("from", "0")))
    if not (step.isdecimal() and start.isdecimal() and len(step) + len(start) < 20):
        return PlainTextResponse("ask with step=12&from=0: numbers\n", status_code=400)
    return await _answer(request, partial(live.rollouts, int(step), int(start)), "application/json")


async def _answer(request: Request, made: Callable[[], bytes | None], kind: str) -> Response:
    """Made in a thread, as it waits for the page's process."""
    from fastapi.concurrency import run_in_threadpool
    from fastapi.responses import PlainTextResponse, Response

    client = request.client.host if request.client else ""
    if client.removeprefix("::ffff:") not in LOOPBACK or foreign(request.scope):
        return PlainTextResponse(_NOT_OWN, status_code=403)
    data = await run_in_threadpool(made)
    if data is None:
        return PlainTextResponse("there is no such page now\n", status_code=503 if kind.startswith("text") else 404)
    return Response(data, media_type=kind, headers={"Cache-Control": "no-store"})


_NOT_OWN = (
    "the page shows prompts and answers: open it from this machine, such as through `kubectl port-forward` or ssh -L\n"
)


def start_server(
    status: LiveStatus,
    metrics: RunMetrics,
    port: int = 0,
    *,
    host: str | None = None,
    live: LivePage | None = None,
) -> HTTPServer:
    """Serves until `close()`. Port 0 takes any free port; `host` defaults to `ORBIT_BIND_ADDRESS`, else loopback.

    Raises:
        OutputError: the port is taken, or the address is not one of this machine's.
    """
    address = host or os.environ.get(BIND_VARIABLE) or "127.0.0.1"
    fix = f"{_FIX}; {BIND_VARIABLE} must be an address of this machine"
    listener = listen(address, port, "spec.observability.metricsPort", fix)
    app: Any = build_app(status, metrics, live)
    return serve_app(Guard(app, token=None) if address in LOOPBACK else app, listener, address, fix)


def serve_app(app: Any, listener: socket.socket, address: str, fix: str) -> HTTPServer:
    """Serves an ASGI application in a daemon thread. Raises OutputError if it does not start."""
    from orbit_runtime.ports.server import build_server

    server = build_server(app, lifespan="off")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="orbit-http", daemon=True)
    thread.start()
    deadline = time.monotonic() + _START_SECONDS
    while not server.started and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.002)
    host, port = listener.getsockname()[:2]
    if not server.started:
        raise OutputError("the server did not start", where=f"{address}:{port}", fix=fix)
    return HTTPServer(host, port, server, thread)


_FIX = "set spec.observability.metricsPort to 0 (any free port), to another port, or to -1 (off)"


def check_port(host: str, port: int) -> None:
    """Checks before a model is loaded, which may take minutes, that the port of `--listen` is free. Nobody can connect.

    Raises:
        OutputError: see `listen`.
    """
    listen(host, port, "--listen", LISTEN_FIX, backlog=None).close()


def listen(host: str, port: int, where: str, fix: str, *, backlog: int | None = 1024) -> socket.socket:
    """
    Args:
        host: `::` is every address, also of IPv4, and also where there is no IPv6.
        backlog: None: takes the port and does not listen.

    Raises:
        OutputError: the port is taken, or the address is not one of this machine's.
    """
    host = "0.0.0.0" if host == "::" and not socket.has_dualstack_ipv6() else host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    if host == "::":
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    # A run that resumes at once must get its port back from lingering sockets of its predecessor.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        if backlog is not None:
            listener.listen(backlog)
    except (OSError, OverflowError) as error:
        listener.close()
        taken = getattr(error, "errno", None) == errno.EADDRINUSE
        what = f"port {port} is in use" if taken else f"cannot listen on {host}:{port}: {error}"
        raise OutputError(what, where=where, fix=fix) from error
    return listener
