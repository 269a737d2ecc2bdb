"""A server in another container of the pod, started by the agent there; used like a process of our own.

An agent that is gone was killed with all its servers, most often because one of them used too much memory, and the
kubelet restarts it. So its servers count as dead, and a start waits for the agent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from orbit_runtime.errors import EngineDiedError, OutputError, UnsupportedError
from orbit_runtime.version import __version__
from orbit_runtime.workers.child.run_token import TOKEN_VARIABLE
from orbit_runtime.workers.servers.process import AGENT_VARIABLE, INSTALL, STOP_SECONDS, WatchedServer

_log = logging.getLogger(__name__)

AGENT_SECONDS = 330.0
"""Restarts of a crashing container are delayed, by five minutes at most."""
GONE = 255
"""Exit status of a server whose agent is gone, or no longer knows the server."""
ASK_SECONDS = 10.0


class RemoteProcess(WatchedServer):
    """One server. The agent keeps its log, which is fetched on demand."""

    def __init__(
        self,
        agent: str,
        name: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        token: str,
        patience: float = AGENT_SECONDS,
    ) -> None:
        """Waits for the agent and has it start the server.

        Args:
            log: path of the server's log here; the agent's copy is written to it on demand.
            token: the run's token.

        Raises:
            EngineDiedError: the agent does not answer within `patience` seconds, or cannot start the server.
            UnsupportedError: the engine's image has another version of Orbit, or no interpreter for SGLang.
            OutputError: the agent has another token.
        """
        super().__init__(name, log)
        # Each server of a run has its own log folder, whose name identifies it.
        self._path = f"/servers/{quote(log.parent.name, safe='')}"
        self._agent = agent
        headers = {"Authorization": f"Bearer {token}"}
        self._http = httpx.Client(base_url=agent, timeout=ASK_SECONDS, trust_env=False, headers=headers)
        self._find_agent(patience)
        order = {"arguments": list(arguments), "environment": dict(environment)}
        answer = self._ask("PUT", self._path, json=order, timeout=2 * STOP_SECONDS + ASK_SECONDS)
        if answer is not None and answer.status_code == 501:
            raise UnsupportedError(f"in the engine's container {answer.json()['detail']}", fix=INSTALL)
        if answer is None or answer.status_code != 200:
            why = "it does not answer any more" if answer is None else answer.text[:500]
            raise EngineDiedError(f"the agent at {agent} did not start {name}: {why}", fix=_FIX)

    def exit_status(self) -> int | None:
        answer = self._ask("GET", self._path)
        return GONE if answer is None or answer.status_code != 200 else answer.json()["exit_status"]

    def resident_bytes(self) -> int | None:
        return self._bytes(self._path + "/memory")

    def gpu_bytes(self, first: int, count: int) -> int | None:
        """Bytes in use on these GPUs of the engine's container; None if unknown. Not run on hardware."""
        return self._bytes("/gpus/memory", params={"first": first, "count": count}, timeout=30.0)

    def _lines(self) -> list[str]:
        """The agent's container has the log; a copy of its end is kept here in case that container goes away."""
        answer = self._ask("GET", self._path + "/log")
        if answer is not None and answer.status_code == 200:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self.log.write_text(answer.json()["text"])
        return super()._lines()

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Safe to call twice. If the agent is gone, there is nothing left to stop."""
        self._ask("DELETE", self._path, timeout=2 * seconds + ASK_SECONDS)

    def _bytes(self, path: str, **options: Any) -> int | None:
        answer = self._ask("GET", path, **options)
        return None if answer is None or answer.status_code != 200 else answer.json()["bytes"]

    def _find_agent(self, patience: float) -> None:
        until = time.monotonic() + patience
        waits = False
        while (answer := self._ask("GET", "/version")) is None or answer.status_code != 200:
            if answer is not None and answer.status_code == 401:
                raise OutputError(
                    f"the agent at {self._agent} has another token than this run",
                    where=TOKEN_VARIABLE,
                    fix="it must name the same file for both, in a folder that they share",
                )
            if not waits:
                _log.warning("no agent answers at %s; waiting for it, %.0f s at most", self._agent, patience)
                waits = True
            if time.monotonic() > until:
                fix = f"{_FIX}; outside a pod unset {AGENT_VARIABLE}"
                raise EngineDiedError(f"no agent answers at {self._agent} for {patience:.0f} s", fix=fix)
            time.sleep(0.5)
        found = answer.json()["version"]
        if found != __version__:
            raise UnsupportedError(
                f"the engine's image has Orbit {found}, the run's has {__version__}",
                where="spec.placement",
                fix="use images of the same version",
            )

    def _ask(self, verb: str, path: str, **options: Any) -> httpx.Response | None:
        with suppress(httpx.TransportError):
            return self._http.request(verb, path, **options)
        return None


_FIX = "read the log of the pod's container `engine`"
