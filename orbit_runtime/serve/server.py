"""A server that answers, from its first request to the end of its last.

Belongs here: the order of starting and stopping. Does not belong here: routes (`app`).
"""

from __future__ import annotations

from dataclasses import dataclass

from orbit_runtime.observability.server import HTTPServer, start_app
from orbit_runtime.serve.app import build_app
from orbit_runtime.serve.metrics import ServeMetrics
from orbit_runtime.serve.open import Opened
from orbit_runtime.serve.sampler import Sampler

KEEP_ALIVE_SECONDS = 30


@dataclass(frozen=True)
class Serving:
    """Running. Example: `serving.url` is `http://127.0.0.1:8000`."""

    sampler: Sampler
    _server: HTTPServer
    _drain_seconds: float

    @property
    def url(self) -> str:
        return self._server.url

    def close(self) -> None:
        """Takes no more connections, lets what is under way end, and aborts what has not ended by then."""
        self._server.close(self._drain_seconds)
        self.sampler.close()
        self._server.close()


def start_serving(opened: Opened, host: str, port: int, token: str | None) -> Serving:
    """
    Raises:
        OutputError: the port is taken, or the address is not one of this machine's.
    """
    limits, metrics = opened.limits, ServeMetrics()
    sampler = Sampler(
        opened.engine, opened.policies.slot_of, metrics.ended, concurrent=limits.concurrent, seconds=limits.seconds
    )
    try:
        app = build_app(opened.policies, sampler, limits, metrics, token)
        server = start_app(
            app,
            host,
            port,
            where="--listen",
            fix="choose another port, 0 for any that is free, and an address of this machine",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            server_header=False,
        )
    except BaseException:
        sampler.close()
        raise
    return Serving(sampler, server, limits.drain_seconds)
