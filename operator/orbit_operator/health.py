"""The operator's ports: `/healthz` and `/readyz`, and `/metrics`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from orbit_operator.metrics import Metrics

STALLED_SECONDS = 180.0
LONGEST_PASS_SECONDS = 300.0


@dataclass
class Health:
    """The operator's own condition. `stalled_since` is set while watching lags behind the API server."""

    clock: Callable[[], float] = time.monotonic
    stalled_since: float | None = None
    lease_problem: Callable[[], str] = str
    """Why the Lease cannot be taken; empty while another operator holds it."""
    is_leader: bool = False
    is_synced: bool = False
    crd_problem: str = ""
    lost: tuple[str, ...] = ()
    """Namespaces that the operator may not read."""
    others: set[str] = field(default_factory=set)
    """Namespaces whose runs another installation owns."""
    passes: dict[int, float] = field(default_factory=dict)
    """When each worker began its current pass."""

    def find_stall(self) -> str:
        """Why the process should be restarted; empty while it is well. An unreachable API server is not a reason."""
        now = self.clock()
        if self.stalled_since is not None and now - self.stalled_since > STALLED_SECONDS:
            return f"watching is behind the API server for {now - self.stalled_since:.0f} s"
        stuck = [now - begun for begun in self.passes.values() if now - begun > LONGEST_PASS_SECONDS]
        return f"a pass takes {max(stuck):.0f} s" if stuck else ""

    def find_unready(self) -> str:
        if not self.is_leader:
            return self.lease_problem() or "another operator holds the Lease"
        return "the first lists have not arrived yet" if not self.is_synced else ""

    def note(self) -> str:
        """A problem that does not stop the operator from working."""
        lost = f"may not read {', '.join(self.lost)}" if self.lost else ""
        others = f"another installation owns the runs of {', '.join(sorted(self.others))}" if self.others else ""
        return "; ".join(filter(None, (self.crd_problem, lost, others)))


async def start_servers(health: Health, metrics: Metrics, health_port: int, metrics_port: int) -> list[web.AppRunner]:
    """Serves both ports on all addresses; port 0 takes any free port."""

    async def healthz(_request: web.Request) -> web.Response:
        return _answer(health.find_stall())

    async def readyz(_request: web.Request) -> web.Response:
        return _answer(health.find_unready(), health.note())

    async def render(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
        await answer.prepare(request)
        for part in metrics.render():
            await answer.write(part)
        return answer

    runners = []
    for port, routes in (
        (health_port, [web.get("/healthz", healthz), web.get("/readyz", readyz)]),
        (metrics_port, [web.get("/metrics", render)]),
    ):
        app = web.Application()
        app.add_routes(routes)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, port=port).start()
        runners.append(runner)
    return runners


def _answer(problem: str, note: str = "") -> web.Response:
    body = {"ok": not problem, "reason": problem or None, "note": note or None}
    return web.json_response(body, status=503 if problem else 200)
