"""The orchestrator's connection to one side: every call takes effect once, however often connection or side are lost.

After a lost connection, the call is repeated under the same number. A restarted side has another boot id: it is opened
again and told everything since its last known state (`on_restart`), followed by the call.

Belongs here: waiting, retrying, telling a lost side from a refusal. Does not belong here: what a restarted side is told
(`remote_trainer`, `remote_engine`).
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import httpx

from orbit_runtime import errors
from orbit_runtime.adapters.fair_lock import FairLock
from orbit_runtime.errors import (
    CredentialsError,
    EngineDiedError,
    InternalError,
    OrbitError,
    OutputError,
    StoppedOnRequest,
    UnsupportedError,
    UsageError,
)
from orbit_runtime.services.frames import CHUNK_BYTES, Frame, chunks, frame, num_bytes, unpack
from orbit_runtime.services.host import BOOT, CALL, GOES, SESSION, WAIT_SECONDS
from orbit_runtime.services.shared_store import spooled
from orbit_runtime.version import __version__
from orbit_runtime.workers.child.heartbeat import sign

CONNECT_SECONDS, NAP_SECONDS, NOTE_SECONDS = 5.0, 0.2, 10.0
LOOK_SECONDS = 3.0
SHOWN = 300
SAME = ("identity", "model", "engine", "base_digest", "teacher", "rounding", "version")
"""Facts that a restarted side must share with its predecessor."""


class _LostError(Exception):
    """Nothing answers, or the process that answered is gone."""


class Connection:
    """May be used from any thread; calls run one at a time, in the order of their callers."""

    def __init__(
        self,
        kind: str,
        url: str,
        token: str | None,
        *,
        patience: float,
        check: Callable[[], None] = lambda: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """
        Args:
            kind: `trainer` or `inference`.
            patience: seconds that a side may be unreachable.
            check: called during a wait; raises if the side will not come back.
        """
        self.kind = kind
        self.url = url.rstrip("/")
        self.turn = FairLock()
        self.on_restart: Callable[[], None] = lambda: None
        """Restores a restarted side, with calls to `tell`."""
        self.note: Callable[[str], None] = lambda text: None
        self.is_stopped: Callable[[], bool] = lambda: False
        self.restarts = 0
        self._patience = patience
        self._check = check
        self._sleep = sleep
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        timeout = httpx.Timeout(3 * WAIT_SECONDS, connect=CONNECT_SECONDS, write=None)
        self._client = httpx.Client(headers=headers, timeout=timeout, trust_env=False)
        self._facts: dict[str, Any] | None = None
        self._boot = ""
        self._run: tuple[str, int] | None = None
        self._session = ""
        self._number = 0

    def facts(self) -> dict[str, Any]:
        """The side's facts; waits until it answers.

        Raises:
            EngineDiedError: (82) nothing answers. CredentialsError: (77) the token is wrong.
            UsageError: (64) it is another kind of process. UnsupportedError: (78) it has another version.
        """
        if self._facts is None:
            self._facts, self._boot = self._reach()
        return self._facts

    def open(self, run: str, execution: int) -> None:
        """Begins a session, with the side in the state that a run's first step expects."""
        with self.turn:
            self.facts()
            self._run = (run, execution)
            while True:
                try:
                    self._open()
                    return
                except _LostError:
                    _, self._boot = self._reach()

    def call(self, name: str, *arguments: Any) -> Any:
        """The side's result. Raises the side's errors."""
        return self.call_framed(name, frame(list(arguments)))

    def call_framed(self, name: str, body: Frame) -> Any:
        with self.turn:
            self._number += 1
            while True:
                try:
                    return self._exchange(f"/call/{name}", body)
                except _LostError as lost:
                    self._come_back(str(lost))

    def tell(self, name: str, *arguments: Any) -> Any:
        """A call made by `on_restart`, which is not retried."""
        return self.tell_framed(name, frame(list(arguments)))

    def tell_framed(self, name: str, body: Frame) -> Any:
        self._number += 1
        return self._exchange(f"/call/{name}", body)

    def look(self, name: str) -> Any:
        """The side's current state, read while calls are in progress; None if it does not answer."""
        try:
            answer = self._client.get(f"{self.url}/look/{name}", timeout=LOOK_SECONDS)
            return answer.json() if answer.status_code == 200 else None
        except (httpx.HTTPError, RuntimeError, ValueError):
            # Without a client, the connection is closed.
            return None

    def close(self) -> None:
        """Ends the session if the side is reachable. Safe to call twice."""
        if self._session and not self._client.is_closed:
            with suppress(httpx.HTTPError):
                self._client.post(f"{self.url}/close", headers={SESSION: self._session}, timeout=CONNECT_SECONDS)
        self._client.close()

    # --- lost and found ---

    def _come_back(self, why: str) -> None:
        """Waits until the side can be called again: the same process, or its successor once its state is restored."""
        since = time.monotonic()
        while True:
            facts, boot = self._reach(since, why)
            if boot == self._boot:
                return
            before = self.facts()
            changed = [name for name in SAME if facts.get(name) != before.get(name)]
            if changed:
                raise UsageError(
                    f"the {self.kind} at {self.url} came back with another {', '.join(changed)}",
                    fix="start it with the manifest, model, machine and threads that the run began with",
                )
            self._boot = boot
            try:
                self._open()
                self.on_restart()
            except _LostError as lost:
                # The side was only partly restored, so the next process to answer is restored from the start.
                why, self._boot = str(lost), ""
                continue
            self._number += 1
            self.restarts += 1
            self.note(f"the {self.kind} at {self.url} was restarted, and its state is restored")
            return

    def _open(self) -> None:
        assert self._run is not None
        run, execution = self._run
        self._session, self._number = f"{execution}-{uuid.uuid4().hex}", 0
        self._exchange("/open", frame({"session": self._session, "run": run, "execution": execution}))

    def _reach(self, since: float | None = None, why: str = "") -> tuple[dict[str, Any], str]:
        started = since or time.monotonic()
        told = time.monotonic()
        while True:
            try:
                answer = self._client.get(f"{self.url}/facts", timeout=CONNECT_SECONDS)
                if answer.status_code < 500:
                    return self._read_facts(answer), answer.headers.get(BOOT, "")
                why = why or f"answered with {answer.status_code}"
            except (httpx.InvalidURL, httpx.UnsupportedProtocol):
                raise UsageError(
                    f"{self.url!r} is no address", where=f"--{self.kind}", fix="write http://HOST:PORT"
                ) from None
            except httpx.ConnectError as error:
                # A process that imports torch starts listening half a minute after its start.
                is_refused = "refused" in str(error).lower()
                why = why or ("nothing listens there yet" if is_refused else str(error))
            except httpx.RequestError as error:
                why = why or f"{error or type(error).__name__}"
            now = time.monotonic()
            if now - started > self._patience:
                raise EngineDiedError(
                    f"the {self.kind} at {self.url} does not answer for {now - started:.0f} s: {why}",
                    fix=f"start it there, or name another address with --{self.kind}; the same command continues",
                )
            self._check()
            if self.is_stopped():
                raise StoppedOnRequest(f"stopped while the {self.kind} at {self.url} was waited for")
            if now - told > NOTE_SECONDS:
                told = now
                self.note(f"waiting for the {self.kind} at {self.url}: {why}")
            self._sleep(NAP_SECONDS)

    def _read_facts(self, answer: httpx.Response) -> dict[str, Any]:
        if answer.status_code in (401, 403):
            self._check_status(answer)
        try:
            facts = json.loads(answer.content)
            kind, version = facts["kind"], facts["version"]
        except (ValueError, KeyError, TypeError):
            raise UsageError(
                f"what answers at {self.url} is no process of a run", where=f"--{self.kind}", fix="check the address"
            ) from None
        if kind != self.kind:
            raise UsageError(
                f"the process at {self.url} is the {kind}",
                where=f"--{self.kind}",
                fix=f"name the {self.kind}'s address",
            )
        if version != __version__:
            raise UnsupportedError(
                f"the {self.kind} at {self.url} runs Orbit {version}, this is {__version__}",
                where=f"--{self.kind}",
                fix="install the same version for all three",
            )
        return dict(facts)

    # --- one exchange ---

    def _exchange(self, path: str, body: Frame) -> Any:
        size = num_bytes(body)
        headers = {SESSION: self._session, CALL: str(self._number), "Content-Length": str(size)}
        while True:
            content = b"".join(body) if size <= CHUNK_BYTES else chunks(body)
            try:
                with self._client.stream("POST", f"{self.url}{path}", content=content, headers=headers) as answer:
                    length = int(answer.headers.get("content-length", 0))
                    # Large bodies are not held in memory, but on this machine's disk.
                    data = spooled(answer.iter_raw(CHUNK_BYTES), length) if answer.status_code == 200 else answer.read()
            except (httpx.RequestError, httpx.StreamError) as error:
                raise _LostError(f"{error or type(error).__name__}") from None
            if answer.headers.get(BOOT) not in (None, self._boot):
                raise _LostError("it was restarted")
            if answer.status_code == 202:
                # It works on, and says how long ago it last showed that.
                if float(answer.content) < 2 * WAIT_SECONDS:
                    sign()
                continue
            self._check_status(answer)
            return unpack(data)

    def _check_status(self, answer: httpx.Response) -> None:
        if answer.status_code == 200:
            return
        if answer.status_code == GOES:
            raise _LostError(f"it ends: {_message_of(answer)}")
        if answer.status_code in (401, 403):
            raise CredentialsError(
                f"the {self.kind} at {self.url} refuses the token",
                where=f"--{self.kind}",
                fix="give all three the same token, by ORBIT_SERVICE_TOKEN or --token-file",
            )
        try:
            told: Mapping[str, Any] = json.loads(answer.content)
            kind = getattr(errors, str(told["error"]))
            assert issubclass(kind, OrbitError)
            error: OrbitError = kind(str(told["message"]), where=told.get("where"), fix=told.get("fix"))
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
            shown = answer.text[:SHOWN]
            if answer.status_code >= 500:
                raise _LostError(f"answered with {answer.status_code}: {shown}") from None
            raise InternalError(f"the {self.kind} at {self.url} answered {answer.status_code}: {shown}") from None
        if isinstance(error, OutputError) and answer.status_code == 409:
            raise error
        error.about = {**error.about, "process": self.kind}
        raise error


def _message_of(answer: httpx.Response) -> str:
    try:
        return str(json.loads(answer.content)["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:SHOWN]
