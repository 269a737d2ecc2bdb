"""A running server, from its first request to the end of its last."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from orbit_runtime.errors import EngineDiedError, OutputError
from orbit_runtime.ports.guard import local_host
from orbit_runtime.serve.channel import Setup
from orbit_runtime.serve.open import ServedModels
from orbit_runtime.serve.sampler import Sampler

START_SECONDS = 120.0
END_SECONDS = 5.0


@dataclass(frozen=True)
class RunningServer:
    """A running server. Example: `serving.url` is `http://127.0.0.1:8000`."""

    url: str
    _sampler: Sampler
    _front: subprocess.Popen[bytes]
    _drain_seconds: float
    _watch: Callable[[], None]

    @property
    def front_pid(self) -> int:
        """Id of the process that speaks HTTP."""
        return self._front.pid

    def check(self) -> None:
        """Restarts servers that have died. Call it periodically while waiting.

        Raises:
            EngineDiedError: (82) the process that speaks HTTP has ended by itself.
        """
        if self._sampler.is_front_gone.is_set():
            raise EngineDiedError("the process that speaks HTTP has ended", fix="start the server again")
        self._watch()

    def close(self) -> None:
        """Accepts no more connections, lets requests in flight end, and aborts the rest after the time limit."""
        self._sampler.stop_front(self._drain_seconds)
        with suppress(subprocess.TimeoutExpired):
            self._front.wait(self._drain_seconds)
        self._sampler.abort()
        with suppress(subprocess.TimeoutExpired):
            self._front.wait(END_SECONDS)
        self._front.kill()
        self._front.wait()
        self._sampler.close()


def start_serving(
    opened: ServedModels, host: str, port: int, token: str | None, update_token: str | None = None
) -> RunningServer:
    """
    Args:
        token: token that clients must send; None for none.
        update_token: token that alone may change weights; None if `token` may too.

    Raises:
        OutputError: the port is taken, or the address is not one of this machine's.
    """
    policies, limits = opened.policies, opened.limits
    ours, theirs = socket.socketpair()
    try:
        front = subprocess.Popen(
            [sys.executable, "-P", "-m", "orbit_runtime.serve.front", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    finally:
        theirs.close()
    setup = Setup(
        str(opened.folder), policies.base.vocabulary, limits, token, host, port, tuple(policies.all()),
        policies.base.name, opened.kind, opened.chat, opened.started, update_token,
    )  # fmt: skip
    sampler = Sampler(opened.engine, policies, seconds=limits.seconds)
    try:
        sampler.start(ours, setup)
        sampler.is_heard.wait(START_SECONDS)
        ready = sampler.ready
        if ready is None:
            raise EngineDiedError("the process that speaks HTTP did not start", fix="see its output above")
        if ready.refusal:
            raise OutputError(ready.refusal)
    except BaseException:
        front.kill()
        front.wait()
        sampler.close()
        raise
    return RunningServer(f"http://{local_host(host)}:{ready.port}", sampler, front, limits.drain_seconds, opened.watch)
