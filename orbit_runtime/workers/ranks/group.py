"""A group of ranks from the run's side: started together, called together, ended together.

Belongs here: the run's side. Ray runs in other processes (`driver`), never in this one. Does not belong here: what
a rank computes (its target, named by a dotted path), or when it is called (`loop`).
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from orbit_runtime import errors
from orbit_runtime.errors import CollectiveError, InternalError, OrbitError, StalledError, UnsupportedError
from orbit_runtime.workers.child.heartbeat import sign
from orbit_runtime.workers.child.process import import_path
from orbit_runtime.workers.ranks.driver import Start
from orbit_runtime.workers.ranks.evidence import ProgressSign, RankEvidence
from orbit_runtime.workers.ranks.guard import MARK, end_marked
from orbit_runtime.workers.ranks.rank import RankOrder, tail
from orbit_runtime.workers.ranks.verdict import judge
from orbit_runtime.workers.system import ClosedAtEnd

INSTALL = "pip install 'orbit-rl[ray]'"
START_SECONDS = 1800.0
"""A rank reads its slice of the base while it starts; one that reports nothing for this long never will."""
CHECK_SECONDS = 0.5
END_SECONDS = 20.0
STOPPED_SECONDS = 60.0
LONGEST_FOLDER = 50
"""Characters: the folder holds sockets, whose names the kernel limits to 107."""


@dataclass(frozen=True)
class GroupSettings:
    """The ranks that a run needs."""

    target: str
    """`package.module:Class`; one object per rank, made in its process."""
    arguments: Mapping[str, Any]
    """Keyword arguments of the class; picklable, the same for all."""
    count: int
    devices: tuple[str, ...] | None = None
    """Each rank's GPU as in CUDA_VISIBLE_DEVICES, the only one that it will see; None for the CPU."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Set in each rank before the target is imported."""
    rendezvous: bool = True
    """Whether to set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; rank 0 holds the port (`ORBIT_RENDEZVOUS_FD`)."""
    address: str | None = None
    """Address of an existing Ray cluster; None for a private one on this machine."""
    nodes: int = 1
    """Number of nodes that the ranks are spread over; more than one needs `address`."""
    ports: tuple[int, int] | None = None
    """First and last port that a private Ray may use; None to choose a free range."""
    stopped_seconds: float = STOPPED_SECONDS
    """Seconds that a rank may be stopped (SIGSTOP) before the group is given up."""


class RankGroup(ClosedAtEnd):
    """Living ranks, for one thread at a time. After any error the group is closed, nothing of it is left, and further
    calls raise the same error.
    """

    def __init__(self, group: GroupSettings, logs: Path, check: Callable[[], None]) -> None:
        """See `start_ranks`."""
        self.logs = logs
        self._ended: OrbitError | None = None
        """The error that ended the ranks."""
        logs.mkdir(parents=True, exist_ok=True)
        self._scratch = Path(tempfile.mkdtemp(prefix="orbit-ray-", dir=_short_folder()))
        ours, theirs = socket.socketpair()
        life_read, self._life = os.pipe()
        driver = [sys.executable, "-m", "orbit_runtime.workers.ranks.driver", str(theirs.fileno())]
        guard = [sys.executable, "-m", "orbit_runtime.workers.ranks.guard", str(life_read), str(self._scratch)]
        path = os.pathsep.join(tuple(import_path()))
        with (logs / "ray.log").open("ab") as out:
            self._guard = subprocess.Popen(
                [*guard, str(theirs.fileno()), *driver], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                pass_fds=(life_read, theirs.fileno()), start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, MARK: str(self._scratch)},
            )  # fmt: skip
        theirs.close()
        os.close(life_read)
        self._connection: Connection | None = Connection(ours.detach())
        order = RankOrder(
            group.target,
            pickle.dumps(group.arguments),
            group.count,
            group.environment,
            group.devices,
            tuple(import_path()),
            group.rendezvous,
        )
        start = Start(
            order, str(logs.resolve()), str(self._scratch), group.address, group.nodes, group.ports,
            group.stopped_seconds,
        )  # fmt: skip
        try:
            self._connection.send(start)
            self._receive("start", check)
        except BaseException:
            self.close()
            raise

    @property
    def is_closed(self) -> bool:
        """Whether the ranks have ended, also after an error."""
        return self._connection is None

    @property
    def guard_pid(self) -> int:
        return self._guard.pid

    def call(self, method: str, *arguments: Any, patience: float | None = None) -> list[Any]:
        """Calls the method on every rank with the same arguments; returns results in the order of ranks.

        Args:
            patience: seconds that may pass without any rank finishing or writing a note (`rank.note`); None: for ever.

        Raises:
            OrbitError: the cause: a rank's own error (`DivergedError` and others), 70 with the rank's traceback, 79 if
                memory ran out, 80 for a GPU fault, 81 if a rank was lost or a collective failed, 83 if a rank made no
                progress. `about` gives the details. All ranks have ended by then.
        """
        if self._ended is not None:
            # The error was raised to the first caller, which may be another thread that only wrote a checkpoint.
            raise self._ended
        if self._connection is None:
            raise InternalError(f"the group of ranks is closed; {method} cannot be called")
        try:
            self._send(method, patience, arguments)
            return [pickle.loads(each) for each in self._receive(method)]
        except OrbitError as error:
            self._ended = error
            self.close()
            raise
        except BaseException:
            self.close()
            raise

    def _send(self, method: str, patience: float | None, arguments: tuple[Any, ...]) -> None:
        assert self._connection is not None
        try:
            self._connection.send((method, patience))
            self._connection.send_bytes(pickle.dumps(arguments, protocol=5))
        except (BrokenPipeError, ConnectionResetError):
            raise self._driver_died(method) from None

    def _receive(self, method: str, check: Callable[[], None] | None = None) -> list[bytes]:
        """Args: check: of a start, which may also take too long; other calls have their own watch in the driver."""
        assert self._connection is not None
        until = time.monotonic() + START_SECONDS
        try:
            while True:
                while check and not select.select([self._connection], [], [], CHECK_SECONDS)[0]:
                    check()
                    if time.monotonic() > until:
                        raise StalledError(
                            f"the ranks did not start within {START_SECONDS:.0f} s", where=str(self.logs)
                        )
                if not isinstance(answer := self._connection.recv(), ProgressSign):
                    break
                sign()
        except (EOFError, ConnectionResetError):
            raise self._driver_died(method) from None
        if isinstance(answer, RankEvidence):
            self._keep_stacks(answer)
            raise judge(answer)
        if isinstance(answer, tuple):
            name, message, where, fix = answer
            error: OrbitError = getattr(errors, name)(message, where=where, fix=fix)
            error.about["stage"] = method
            raise error
        assert isinstance(answer, list)
        return answer

    def _keep_stacks(self, evidence: RankEvidence) -> None:
        """Stores stacks beside the logs, also those of ranks on other nodes."""
        for each in evidence.ranks:
            if each.seen and each.seen.stacks:
                (self.logs / f"rank-{each.rank}.stacks").write_text(each.seen.stacks)
            log = self.logs / f"rank-{each.rank}.log"
            if each.seen and not log.exists():
                log.write_text("\n".join(each.seen.log) + "\n")

    def _driver_died(self, method: str) -> OrbitError:
        error = CollectiveError(
            f"the process that holds the ranks (Ray's driver) was lost in stage {method}; all ranks were ended",
            where=str(self.logs / "ray.log"),
            fix="start again: the run continues from its newest checkpoint; the end of its log:\n"
            + "\n".join(tail(self.logs / "ray.log")),
        )
        error.about["stage"] = method
        return error

    def close(self) -> None:
        """Ends every rank and the private Ray, and waits until they are gone. Safe to call twice."""
        if self._connection is None:
            return
        self._connection.close()
        self._connection = None
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(END_SECONDS / 2)
        os.close(self._life)
        try:
            self._guard.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        if self._guard.returncode:
            # The guard was killed, so nothing has ended the processes below it.
            end_marked(str(self._scratch))
        shutil.rmtree(self._scratch, ignore_errors=True)
        for kind in ("note", "stacks"):
            for path in self.logs.glob(f"rank-*.{kind}"):
                if kind == "note" or not path.stat().st_size:
                    path.unlink(missing_ok=True)


def start_ranks(group: GroupSettings, logs: Path, check: Callable[[], None] = lambda: None) -> RankGroup:
    """Starts a process per rank and makes the target's object in each; ranks start in the order of their numbers.

    Args:
        logs: folder for `rank-N.log` of each rank, `ray.log` of the processes that hold them, and stacks of calls that
            were given up.
        check: called about twice a second while they start; what it raises ends them.

    Raises:
        UnsupportedError: (78) Ray is not installed, or the cluster has no room.
        OutputError: (73) a port of `group.ports` is taken.
        OrbitError: see `RankGroup.call`.
    """
    assert group.devices is None or len(group.devices) == group.count
    if importlib.util.find_spec("ray") is None:
        raise UnsupportedError(
            "trainer ranks are Ray's actors, and Ray is not installed here", where="spec.training.trainer", fix=INSTALL
        )
    if group.nodes > 1 and group.address is None:
        raise UnsupportedError(
            f"{group.nodes} nodes need a Ray cluster", where="spec.placement.nodes", fix="name its head in RAY_ADDRESS"
        )
    return RankGroup(group, logs, check)


def _short_folder() -> str:
    """Folder for a private Ray's sessions: the temporary folder, or /tmp if its name is too long."""
    found = tempfile.gettempdir()
    return found if len(found) + len("/orbit-ray-12345678") <= LONGEST_FOLDER else "/tmp"
