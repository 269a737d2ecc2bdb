"""A run's Ray: either private, a head with one node on the loopback device, with its own ports and folder; or a node
without resources in an existing cluster, which is how a program talks to one.

Belongs here: their settings, their start, and whether the daemons live. Does not belong here: what runs in it
(`driver`), or ending it by force (`guard`). Imported by the driver only, whose children the daemons are.

Ray's public `ray.init` cannot set the ports of its workers, so the node is created as in `ray.cluster_utils`.
"""

from __future__ import annotations

import inspect
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from orbit_runtime.errors import CollectiveError, OutOfMemoryError, OutputError, StorageError, UnsupportedError
from orbit_runtime.workers.child.process import descendants, describe_exit

HOST = "127.0.0.1"
FIXED_PORTS = 7
SPARE_PORTS = 8
FIRST_BLOCK, BLOCK, BLOCKS = 20_000, 64, 190
"""Blocks of ports below the system's ephemeral range (32768 and up)."""
RESOURCE = "orbit_rank"
REGISTER_SECONDS = 600.0
"""Limit for the start of a Ray daemon, while it lives."""
STORE_BYTES = 1 << 28
"""Size of Ray's object store. Objects that do not fit go through the disk."""


def set_environment(environment: MutableMapping[str, str]) -> None:
    """Call it before `import ray`: sets a token that only this process tree has, and disables telemetry."""
    environment.update(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=secrets.token_hex(32),
        RAY_USAGE_STATS_ENABLED="0",
        RAY_DISABLE_IMPORT_WARNING="1",
        # Otherwise Ray replaces a loopback address by one that other machines can reach.
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        # Allocates the whole store at the start, so a full /dev/shm is found then and not as a bus error later.
        RAY_preallocate_plasma_memory="1",
        RAY_enable_metrics_collection="0",
        # Ray's own time limits for its daemons, 30 s and 60 s, are too short on a busy machine: a node agent ended
        # itself because its helpers had not got far enough, and so did each one after it.
        RAY_agent_register_timeout_ms=str(round(1000 * REGISTER_SECONDS)),
        RAY_raylet_start_wait_time_s=str(round(REGISTER_SECONDS)),
        RAY_worker_register_timeout_seconds=str(round(REGISTER_SECONDS)),
        RAY_gcs_server_port_wait_time_s=str(round(REGISTER_SECONDS)),
        # Ray would give workers a lower priority than everything else, such as an engine's idle scheduler.
        RAY_worker_niceness="0",
        # Ray would write a process title over the process's environment, by which its group is found if the guard was
        # killed (`guard.end_marked`).
        SPT_NOENV="1",
        GLOO_SOCKET_IFNAME=environment.get("GLOO_SOCKET_IFNAME", "lo"),
    )
    environment.pop("RAY_ADDRESS", None)


class PrivateRay:
    """A running private Ray."""

    def __init__(self, folder: Path, ranks: int, ports: tuple[int, int]) -> None:
        """Starts it.

        Args:
            folder: folder for its session, removed by the caller.
            ports: first and last port that it may use.

        Raises:
            OutputError: (73) one of the ports is taken.
            OutOfMemoryError: (79) /dev/shm has no room for the object store.
            StorageError: (74) the disk is full.
        """
        from ray._private.node import Node
        from ray._private.parameter import RayParams

        check_shared_memory()
        check_disk(folder)
        check_ports(ports)
        first, last = ports
        names = (
            "gcs_server_port", "node_manager_port", "object_manager_port", "dashboard_agent_listen_port",
            "metrics_agent_port", "runtime_env_agent_port", "metrics_export_port",
        )  # fmt: skip
        fixed: dict[str, Any] = {name: first + index for index, name in enumerate(names)}
        # Declared as text, but used as a truth value.
        fixed["include_log_monitor"] = False
        with _patient(fixed):
            self._node = Node(
                RayParams(
                    **fixed, min_worker_port=first + FIXED_PORTS, max_worker_port=last, node_ip_address=HOST,
                    include_dashboard=False, no_monitor=True, temp_dir=str(folder),
                    object_store_memory=STORE_BYTES, num_cpus=0, num_gpus=0, resources={RESOURCE: ranks},
                ),
                head=True, shutdown_at_exit=False, spawn_reaper=True,
            )  # fmt: skip
        self.address = str(self._node.address)

    def death(self) -> str | None:
        """The daemon that has died, and how; None while all of them live."""
        words = {"gcs_server": "Ray's head (gcs_server)", "raylet": "Ray's node agent (raylet)"}
        for name, known in words.items():
            for each in self._node.all_processes.get(name, ()):
                status = each.process.poll()
                if status is not None:
                    return f"{known} {describe_exit(status, 'was killed by', 'ended with')}"
        return None


class JoinedRay:
    """This machine as a node of a cluster, for as long as the driver lives. No rank is placed on it.

    Ray's drivers talk to a node agent on their own machine. If one already runs here, this is a second one.
    """

    def __init__(self, address: str, folder: Path, patience: float) -> None:
        """Joins it.

        Args:
            address: HOST:PORT of its head.
            folder: for what the node agent writes, unless the cluster's own folder says otherwise.
            patience: seconds to wait for the head: on a cluster its pod may start after this one.

        Raises:
            CollectiveError: (81) there is no head, or its version of Ray or Python differs.
            OutOfMemoryError: (79) /dev/shm has no room for the object store.
            StorageError: (74) the disk is full.
        """
        from ray._private.node import Node
        from ray._private.parameter import RayParams

        check_shared_memory()
        check_disk(folder)
        _await_head(address, patience)
        # Declared as text, but used as a truth value; a free port, because another node agent may have Ray's own.
        fixed: dict[str, Any] = {"include_log_monitor": False, "dashboard_agent_listen_port": None}
        params = RayParams(
            **fixed, gcs_address=address, num_cpus=0, num_gpus=0, object_store_memory=STORE_BYTES,
            include_dashboard=False, no_monitor=True,
        )  # fmt: skip
        with _patient({}):
            self._node = Node(params, head=False, shutdown_at_exit=False, spawn_reaper=True)


def _await_head(address: str, patience: float) -> None:
    """Waits until the head accepts connections. Its name may be unknown until its pod exists."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UnsupportedError(
            f"`{address}` is not HOST:PORT", where="RAY_ADDRESS", fix="name a Ray head, as HOST:6379"
        )
    until = time.monotonic() + patience
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=5):
                return
        except OSError as error:
            if time.monotonic() > until:
                raise CollectiveError(
                    f"no head of a Ray cluster answers at {address} for {patience:.0f} s: {error}",
                    where="RAY_ADDRESS",
                    fix="start one (ray start --head), or unset it",
                ) from None
        time.sleep(1)


@contextmanager
def _patient(ports: Mapping[str, Any], seconds: float = REGISTER_SECONDS) -> Iterator[None]:
    """While active, a node agent can start however busy the machine is, and Ray waits for it as long as it lives.

    Two time limits in Ray's code are too short at a load of 13 on two cores, and retrying discards what was started, so
    no start ever succeeds: after 15 s the node agent ends itself because its helpers have not reported their ports yet
    (`node_manager.cc`, "Timed out waiting for file"), and after 30 s Ray gives up on the node agent. The ports are
    known in advance, so they are written here on the helpers' behalf.

    Args:
        ports: the fixed ports of `RayParams`.
    """
    # Both modules lack type hints.
    raylet: Any = import_module("ray._raylet")
    services: Any = import_module("ray._private.services")
    ask, start = services.get_node, services.start_raylet
    names = {
        raylet.METRICS_AGENT_PORT_NAME: "metrics_agent_port",
        raylet.METRICS_EXPORT_PORT_NAME: "metrics_export_port",
        raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME: "dashboard_agent_listen_port",
        raylet.RUNTIME_ENV_AGENT_PORT_NAME: "runtime_env_agent_port",
    }

    def start_raylet(*given: Any, **named: Any) -> Any:
        asked = inspect.signature(start).bind(*given, **named).arguments
        for name, parameter in names.items():
            if parameter not in ports:
                continue
            raylet.persist_port(asked["session_dir"], asked["node_id"], name, ports[parameter])
        return start(*given, **named)

    def get_node(*asked: Any) -> Any:
        until = time.monotonic() + seconds
        while True:
            try:
                return ask(*asked)
            except RuntimeError:
                if time.monotonic() > until or _has_died("raylet"):
                    raise
                time.sleep(0.2)

    services.get_node, services.start_raylet = get_node, start_raylet
    try:
        yield
    finally:
        services.get_node, services.start_raylet = ask, start


def _has_died(name: str) -> bool:
    """Whether the process of this name below this one is an unreaped zombie, or does not exist."""
    states = []
    for pid in descendants(os.getpid()):
        with suppress(OSError, IndexError):
            head, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
            if head.partition("(")[2] == name:
                states.append(rest.split()[0])
    return not states or "Z" in states


def port_block(ranks: int) -> tuple[tuple[int, int], int]:
    """A range of free ports, and a descriptor that reserves it on this machine against other runs while it is open.

    Raises OutputError (73) if no block is free.
    """
    import fcntl
    import tempfile

    size = FIXED_PORTS + SPARE_PORTS + 2 * ranks
    blocks = -(-size // BLOCK)
    start = secrets.randbelow(BLOCKS)
    for turn in range(BLOCKS):
        first = FIRST_BLOCK + (start + turn) % (BLOCKS - blocks + 1) * BLOCK
        name = Path(tempfile.gettempdir()) / f".orbit-ports-{os.getuid()}-{first}"
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            check_ports((first, first + size - 1))
            return (first, first + size - 1), lock
        except (BlockingIOError, OutputError):
            os.close(lock)
    raise OutputError("no range of ports is free for the ranks", where=f"{HOST}:{FIRST_BLOCK}", fix="end other runs")


def check_ports(ports: tuple[int, int]) -> None:
    """Raises OutputError (73) for the first port that is taken: Ray would wait a minute and not say why."""
    for port in range(ports[0], ports[1] + 1):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                raise OutputError(
                    f"port {port} of the ranks' range {ports[0]}-{ports[1]} cannot be used: {error.strerror}",
                    where=f"{HOST}:{port}",
                    fix="end what listens there (ss -ltnp), or leave the choice of the range to Orbit",
                ) from None


def check_shared_memory(place: str = "/dev/shm") -> None:
    """Raises OutOfMemoryError (79) if the object store does not fit."""
    status = os.statvfs(place)
    free = status.f_bavail * status.f_frsize
    if free < STORE_BYTES + (STORE_BYTES >> 3):
        raise OutOfMemoryError(
            f"{place} has {free >> 20} MiB free; what the ranks exchange needs {STORE_BYTES * 9 // 8 >> 20} MiB",
            where=place,
            fix="remove what is left there, or give the container more (docker run --shm-size; in a pod an emptyDir of "
            "medium Memory)",
        )


def check_disk(folder: Path, least: int = 1 << 26) -> None:
    """Raises StorageError (74) if the disk has no room for sockets and logs."""
    status = os.statvfs(folder)
    if status.f_bavail * status.f_frsize < least:
        raise StorageError(
            f"the disk is full: {status.f_bavail * status.f_frsize >> 20} MiB free for the ranks' logs",
            where=str(folder),
            fix="free some space, or set TMPDIR to a folder on another disk",
        )
