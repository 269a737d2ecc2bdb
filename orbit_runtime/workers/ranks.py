"""A group of ranks as a run sees it: started together, called together, ended together.

Belongs here: the run's side. Ray is in other processes (`ray_driver`), and never in this one. Does not belong here:
what a rank computes (its target, named by a dotted path), or when it is called (`loop`).
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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from orbit_runtime import errors
from orbit_runtime.errors import CollectiveError, InternalError, OrbitError, StalledError, UnsupportedError
from orbit_runtime.workers.rank_evidence import Evidence
from orbit_runtime.workers.rank_guard import MARK, end_marked
from orbit_runtime.workers.rank_process import Order, group_path, tail
from orbit_runtime.workers.rank_verdict import judge
from orbit_runtime.workers.ray_driver import Start

INSTALL = "pip install 'orbit-rl[ray]'"
START_SECONDS = 1800.0
"""A rank reads its slice of the base while it starts; one that says nothing for so long will not."""
END_SECONDS = 20.0
STOPPED_SECONDS = 60.0
LONGEST_FOLDER = 50
"""Characters: sockets stand below it, whose names the kernel limits to 107."""


@dataclass(frozen=True)
class Group:
    """Which ranks a run wants."""

    target: str
    """`package.module:Class`; one object per rank, made in its process."""
    arguments: Mapping[str, Any]
    """Keyword arguments of the class; picklable, the same for all."""
    count: int
    devices: tuple[str, ...] | None = None
    """GPU of each rank as CUDA_VISIBLE_DEVICES names it, the only one that it will see; None: on the CPU."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Set in each rank before the target is imported."""
    rendezvous: bool = True
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, and rank 0 holds the port (`ORBIT_RENDEZVOUS_FD`)."""
    address: str | None = None
    """Of an existing Ray cluster; None: a private one on this machine."""
    nodes: int = 1
    """Over how many nodes the ranks are spread; more than one needs `address`."""
    ports: tuple[int, int] | None = None
    """First and last of those that a private Ray may use; None: a free range is chosen."""
    stopped_seconds: float = STOPPED_SECONDS
    """How long a rank may stand stopped (SIGSTOP) before the group is given up."""


class RankGroup:
    """Living ranks. For one thread at a time. After any error it is closed, nothing of it is left, and whoever calls
    again is told the same."""

    def __init__(self, group: Group, logs: Path) -> None:
        """See `start_ranks`."""
        self.logs = logs
        self._ended: OrbitError | None = None
        """Why there are no ranks any more."""
        logs.mkdir(parents=True, exist_ok=True)
        self._scratch = Path(tempfile.mkdtemp(prefix="orbit-ray-", dir=_short_folder()))
        ours, theirs = socket.socketpair()
        life_read, self._life = os.pipe()
        driver = [sys.executable, "-m", "orbit_runtime.workers.ray_driver", str(theirs.fileno())]
        guard = [sys.executable, "-m", "orbit_runtime.workers.rank_guard", str(life_read), str(self._scratch)]
        path = os.pathsep.join(group_path())
        with (logs / "ray.log").open("ab") as out:
            self._guard = subprocess.Popen(
                [*guard, str(theirs.fileno()), *driver], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                pass_fds=(life_read, theirs.fileno()), start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, MARK: str(self._scratch)},
            )  # fmt: skip
        theirs.close()
        os.close(life_read)
        self._connection: Connection | None = Connection(ours.detach())
        order = Order(
            group.target, group.arguments, group.count, group.environment, group.devices, group_path(), group.rendezvous
        )
        start = Start(
            order, str(logs.resolve()), str(self._scratch), group.address, group.nodes, group.ports,
            group.stopped_seconds,
        )  # fmt: skip
        try:
            self._connection.send(start)
            self._receive("start", START_SECONDS)
        except BaseException:
            self.close()
            raise

    @property
    def guard_pid(self) -> int:
        return self._guard.pid

    def call(self, method: str, *arguments: Any, patience: float | None = None) -> list[Any]:
        """Calls the method of every rank with the same arguments; results in the order of ranks.

        Args:
            patience: seconds in which no rank need finish or note anything (`rank_notes`); None: for ever.

        Raises:
            OrbitError: the one that says why: of a rank's own (`DivergedError` and others), 70 with the rank's
                traceback, 79 where memory ran out, 80 of a GPU, 81 where a rank was lost or a collective failed,
                83 where a rank did not get on. `about` says which. All ranks have ended by then.
        """
        if self._ended is not None:
            # The first who asked has been told, and may be another thread, which only wrote a checkpoint.
            raise self._ended
        if self._connection is None:
            raise InternalError(f"the group of ranks is closed; {method} cannot be called")
        try:
            self._send(method, patience, arguments)
            return [pickle.loads(each) for each in self._receive(method, None)]
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

    def _receive(self, method: str, seconds: float | None) -> list[bytes]:
        assert self._connection is not None
        try:
            if not select.select([self._connection], [], [], seconds)[0]:
                raise StalledError(f"the ranks did not start within {seconds:.0f} s", where=str(self.logs))
            answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._driver_died(method) from None
        if isinstance(answer, Evidence):
            self._keep_stacks(answer)
            raise judge(answer)
        if isinstance(answer, tuple):
            name, message, where, fix = answer
            error: OrbitError = getattr(errors, name)(message, where=where, fix=fix)
            error.about["stage"] = method
            raise error
        assert isinstance(answer, list)
        return answer

    def _keep_stacks(self, evidence: Evidence) -> None:
        """Beside the logs, for ranks of other nodes too."""
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
        """Ends every rank and all of the private Ray, and waits until they are gone. Safe to call twice."""
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
            # Somebody killed it, so nobody has ended what was below it.
            end_marked(str(self._scratch))
        shutil.rmtree(self._scratch, ignore_errors=True)
        for kind in ("note", "stacks"):
            for path in self.logs.glob(f"rank-*.{kind}"):
                if kind == "note" or not path.stat().st_size:
                    path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_ranks(group: Group, logs: Path) -> RankGroup:
    """Starts a process per rank and makes the target's object in each; ranks start in order of their numbers.

    Args:
        logs: `rank-N.log` of each, `ray.log` of what holds them, and stacks where a call was given up.

    Raises:
        UnsupportedError: (78) Ray is not installed, or the cluster has no room.
        OutputError: (73) a port of `group.ports` is taken.
        OrbitError: as `RankGroup.call`.
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
    return RankGroup(group, logs)


def _short_folder() -> str:
    """For the sessions of a private Ray: the temporary folder, or /tmp where that has too long a name."""
    found = tempfile.gettempdir()
    return found if len(found) + len("/orbit-ray-12345678") <= LONGEST_FOLDER else "/tmp"
