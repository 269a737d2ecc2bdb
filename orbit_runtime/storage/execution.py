"""Executions: the life of one process tree as the writer of a run folder, and the number that fences its predecessors.

Belongs here: claims, heartbeats, refusals. Does not belong here: what is written (`bundles`).

Under `executions/`: `000003.json` (create-only: who took number 3), `000003.heartbeat.json` (rewritten while it lives,
and once at its end), `000003.start.json` (seconds of each stage of its start), `.lock` (flock, local folders only).
Machines that share a folder need clocks that agree to within 20 s.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from orbit_runtime.errors import OrbitError, OutputError
from orbit_runtime.storage.filelock import LockBusyError, release_lock, take_lock
from orbit_runtime.storage.process import Process, current_process, is_gone
from orbit_runtime.storage.store import AlreadyExists, FolderGone, NotFound, Store

HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 45.0
_FOLDER = "executions/"
_LOCK = f"{_FOLDER}.lock"
_log = logging.getLogger("orbit.storage")


@dataclass(frozen=True, slots=True)
class ExecutionRecord:
    """The process that took a number. Example: `ExecutionRecord(3, "quickstart", Process("gpu-7", …), True, 1.7e9,
    "a2", "6f…")`
    """

    execution: int
    run: str
    process: Process
    locked: bool
    """Whether it holds the folder's flock for as long as it lives."""
    started: float
    attempt: str | None
    """The operator's attempt that started it; `None` if started by hand."""
    nonce: str
    """Makes the record unique, so that its writer recognises it."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The last sign of life. `state` is `live` or `ended`."""

    at: float
    state: str
    reason: str | None = None


class Execution:
    """The right to write a run folder, until a higher number exists."""

    def __init__(self, store: Store, record: ExecutionRecord, lock: int | None) -> None:
        self.number = record.execution
        self.record = record
        self._store = store
        self._lock = lock
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        """Refuse to continue if a higher execution exists, or the own record is gone. Called before every manifest;
        safe to call often.

        Raises:
            OutputError: another execution took over.
            StorageError: the run folder was removed, moved or replaced.
        """
        newest = _newest_number(self._store)
        if newest > self.number:
            by = _read_record(self._store, newest)
            who = f" on host {by.process.host} (pid {by.process.pid})" if by else ""
            raise OutputError(
                f"execution {self.number} of this run was taken over by execution {newest}{who}",
                where=self._store.uri,
                fix="nothing here: the newer execution continues the run",
            )
        self._store.check_owner()

    def beat(self) -> None:
        """Write one sign of life."""
        self._write(Heartbeat(self._store.clock(), "live"), HEARTBEAT_SECONDS / 2)

    def start_heartbeat(self) -> None:
        """Beat now and every ten seconds in a daemon thread, until `release`. A failed beat is only logged."""
        assert self._thread is None, "the heartbeat was started before"
        self._thread = threading.Thread(target=self._beat_until_ended, name="orbit-heartbeat", daemon=True)
        self._thread.start()

    def record_start(self, seconds: Mapping[str, float]) -> None:
        """Writes how long each stage of the start took. A store that does not take it now is only logged."""
        try:
            self._store.put(f"{_FOLDER}{self.number:06d}.start.json", _json({"seconds": dict(seconds)}))
        except OrbitError as error:
            _log.warning("the start of execution %d could not be recorded: %s", self.number, error)

    def release(self, ended: str) -> None:
        """Stop the heartbeat, record why the execution ended (`done`, `stopped`, an error's name), release the lock.

        Safe to call twice. An unavailable store does not make a finished run fail: its heartbeat goes stale instead.
        """
        if not self._stop_heartbeat():
            return
        self._record_end(ended)
        self._unlock()

    def withdraw(self, ended: str) -> None:
        """Replaces `release` for a first execution that wrote nothing but its claim: leaves no trace of it.

        Removes its records, and the local folder if nothing else is in it. If another execution followed or the folder
        holds more, it is released as usual. `release` does nothing afterwards.
        """
        if not self._stop_heartbeat():
            return
        records = {f"{_FOLDER}{self.number:06d}.json", f"{_FOLDER}{self.number:06d}.heartbeat.json"}
        try:
            if self.number == 1 and records >= {key for key in self._store.list() if key != _LOCK}:
                self._store.delete(sorted(records))
                self._remove_folder()
            else:
                self._record_end(ended)
        except OrbitError as error:
            _log.warning("execution %d could not be withdrawn: %s", self.number, error)
        self._unlock()

    def _stop_heartbeat(self) -> bool:
        """False if it was stopped before."""
        if self._ended.is_set():
            return False
        self._ended.set()
        if self._thread is not None:
            self._thread.join(HEARTBEAT_SECONDS)
        return True

    def _record_end(self, ended: str) -> None:
        try:
            self._write(Heartbeat(self._store.clock(), "ended", ended), HEARTBEAT_SECONDS)
        except FolderGone:
            return
        except OrbitError as error:
            _log.warning("the end of execution %d could not be recorded: %s", self.number, error)

    def _remove_folder(self) -> None:
        if self._store.root is None:
            return
        with suppress(OSError):
            # Still locked: a process that opens the file meanwhile is refused, and finds a new file later.
            (self._store.root / _LOCK).unlink(missing_ok=True)
            (self._store.root / _FOLDER).rmdir()
            self._store.root.rmdir()

    def _unlock(self) -> None:
        if self._lock is not None:
            release_lock(self._lock)
            self._lock = None

    def _beat_until_ended(self) -> None:
        while not self._ended.is_set():
            try:
                self.beat()
            except FolderGone:
                # The next write of the run says so.
                return
            except OrbitError as error:
                _log.warning("heartbeat of execution %d failed: %s", self.number, error)
            self._ended.wait(HEARTBEAT_SECONDS)

    def _write(self, heartbeat: Heartbeat, deadline: float) -> None:
        key = f"{_FOLDER}{self.number:06d}.heartbeat.json"
        patience = min(deadline, self._store.deadline_seconds)
        self._store.with_deadline(patience).put(key, _json(asdict(heartbeat)))


def claim_execution(
    store: Store,
    *,
    run_name: str,
    clock: Callable[[], float] = time.time,
    takeover: bool = False,
    attempt: str | None = None,
    process: Process | None = None,
) -> Execution:
    """Become the one writer of a run folder.

    Args:
        takeover: proceed even if another execution looks alive: the operator ended it and started this attempt.
        attempt: the operator's name for this start.
        process: the claiming process; this process by default.

    Raises:
        OutputError: a live execution holds the folder.
    """
    process = process or current_process()
    lock, store.owner = None, None
    if store.root is not None:
        try:
            lock = take_lock(store.root / _LOCK)
        except LockBusyError:
            if not takeover:
                raise _in_use(store, _newest_record(store), clock(), proven=True) from None
        except FileNotFoundError:
            raise OutputError(
                "the folder cannot be created", where=store.uri, fix="choose a folder that can be written"
            ) from None
        except OSError as error:
            raise store.explain(error, "locking the folder") from None
        else:
            if lock is None:
                _log.warning("%s: this file system has no flock; relying on heartbeats alone", store.uri)
    try:
        record = _claim(store, run_name, clock, takeover, attempt, process, locked=lock is not None)
        if lock is not None and not takeover:
            store.sweep()
    except BaseException:
        if lock is not None:
            release_lock(lock)
        raise
    return Execution(store, record, lock)


def newest_execution(store: Store) -> tuple[ExecutionRecord, Heartbeat | None] | None:
    """The last writer and its last sign of life, for `orbit ls` and `/status`; `None` in a new folder."""
    record = _newest_record(store)
    return (record, _read_heartbeat(store, record.execution)) if record else None


def is_live(record: ExecutionRecord, heartbeat: Heartbeat | None, here: Process, now: float, *, locked: bool) -> bool:
    """Whether an execution must be considered alive. Pure.

    Args:
        locked: whether we hold the folder's flock, so that an earlier holder on this machine must be dead.
    """
    if heartbeat is not None and heartbeat.state == "ended":
        return False
    if is_gone(record.process, here):
        return False
    if locked and record.locked and record.process.host == here.host:
        return False
    last_sign = heartbeat.at if heartbeat else record.started
    return now - last_sign < STALE_SECONDS


def _claim(
    store: Store,
    run_name: str,
    clock: Callable[[], float],
    takeover: bool,
    attempt: str | None,
    process: Process,
    *,
    locked: bool,
) -> ExecutionRecord:
    while True:
        number = _newest_number(store)
        newest = _read_record(store, number) if number else None
        if newest is not None and not takeover:
            heartbeat = _read_heartbeat(store, number)
            if is_live(newest, heartbeat, process, clock(), locked=locked):
                raise _in_use(store, newest, clock())
        record = ExecutionRecord(number + 1, run_name, process, locked, clock(), attempt, uuid.uuid4().hex)
        own = (f"{_FOLDER}{record.execution:06d}.json", _json(asdict(record)))
        try:
            store.put(*own, create_only=True)
        except AlreadyExists:
            if _newest_number(store) > number:
                continue  # Another claim was faster: judge it next.
            raise OutputError(
                f"{own[0]} is there, and is not the record of an execution",
                where=store.uri,
                fix="remove what has that name, or choose another folder",
            ) from None
        store.owner = own
        return record


def _in_use(store: Store, record: ExecutionRecord | None, now: float, *, proven: bool = False) -> OutputError:
    who, wait = "another process that is just starting", ""
    if record is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(record.started))
        heartbeat = _read_heartbeat(store, record.execution)
        age = max(0.0, now - (heartbeat.at if heartbeat else record.started))
        who = (
            f"execution {record.execution} (pid {record.process.pid} on host {record.process.host}, since {since}, "
            f"last sign of life {age:.0f} s ago)"
        )
        if not proven:
            wait = f"; if that one is dead, start again in {max(1.0, STALE_SECONDS - age):.0f} s"
    return OutputError(
        f"this run folder is in use by {who}",
        where=store.uri,
        fix=f"stop that run, or give this one another folder with --out{wait}",
    )


def _newest_number(store: Store) -> int:
    numbers = [
        int(found.group(1)) for key in store.list(_FOLDER) if (found := re.fullmatch(_FOLDER + r"(\d+)\.json", key))
    ]
    return max(numbers, default=0)


def _newest_record(store: Store) -> ExecutionRecord | None:
    number = _newest_number(store)
    return _read_record(store, number) if number else None


def _read_record(store: Store, number: int) -> ExecutionRecord | None:
    facts = _read_json(store, f"{_FOLDER}{number:06d}.json")
    try:
        return ExecutionRecord(**{**facts, "process": Process(**facts["process"])}) if facts else None
    except (TypeError, KeyError):
        return None


def _read_heartbeat(store: Store, number: int) -> Heartbeat | None:
    facts = _read_json(store, f"{_FOLDER}{number:06d}.heartbeat.json")
    try:
        return Heartbeat(**facts) if facts else None
    except TypeError:
        return None


def _read_json(store: Store, key: str) -> dict[str, Any] | None:
    try:
        facts = json.loads(store.get(key))
    except (NotFound, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def _json(facts: dict[str, Any]) -> bytes:
    return json.dumps(facts, indent=1).encode()
