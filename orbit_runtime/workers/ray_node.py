"""The Ray of one run: a private one, a head with one node on the loopback device, with ports and a folder of its own;
or a node without resources of an existing cluster, which is how a program speaks to one.

Belongs here: their settings, their start, and whether the daemons live. Does not belong here: what runs in it
(`ray_driver`), or its end by force (`rank_guard`). Imported by the driver only, whose children the daemons are.

Ray's public `ray.init` cannot be told which ports its workers use, so the node is made as `ray.cluster_utils` does.
"""

from __future__ import annotations

import inspect
import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from orbit_runtime.errors import CollectiveError, OutOfMemoryError, OutputError, StorageError, UnsupportedError
from orbit_runtime.workers.rank_guard import descendants

HOST = "127.0.0.1"
FIXED_PORTS = 7
SPARE_PORTS = 8
FIRST_BLOCK, BLOCK, BLOCKS = 20_000, 64, 190
"""Blocks of ports below those that the system hands out by itself (32768 and up)."""
RESOURCE = "orbit_rank"
REGISTER_SECONDS = 600.0
"""Longest that a daemon of Ray's may take to start, while it lives."""
STORE_BYTES = 1 << 28
"""Ray's object store. Larger objects than it holds go through the disk."""


def set_environment(environment: MutableMapping[str, str]) -> None:
    """Before `import ray`: a token that only this tree of processes has, and nothing that calls home."""
    environment.update(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=secrets.token_hex(32),
        RAY_USAGE_STATS_ENABLED="0",
        RAY_DISABLE_IMPORT_WARNING="1",
        # Else an address on the loopback device is turned into one that others reach.
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        # All of the store at the start: a full /dev/shm is found then, and not as a bus error later.
        RAY_preallocate_plasma_memory="1",
        RAY_enable_metrics_collection="0",
        # Ray's own patience with its daemons, 30 s and 60 s, is not that of a machine whose cores others want: a node
        # agent ended itself because its helpers had not got far enough, and so did each one after it.
        RAY_agent_register_timeout_ms=str(round(1000 * REGISTER_SECONDS)),
        RAY_raylet_start_wait_time_s=str(round(REGISTER_SECONDS)),
        RAY_worker_register_timeout_seconds=str(round(REGISTER_SECONDS)),
        RAY_gcs_server_port_wait_time_s=str(round(REGISTER_SECONDS)),
        # Ray would have workers give way to everything else, such as an engine's idle scheduler.
        RAY_worker_niceness="0",
        # A title of Ray's would be written over a process's environment, by which its group is found when the guard
        # was killed (`rank_guard.end_marked`).
        SPT_NOENV="1",
        GLOO_SOCKET_IFNAME=environment.get("GLOO_SOCKET_IFNAME", "lo"),
    )
    environment.pop("RAY_ADDRESS", None)


class PrivateRay:
    """A started one."""

    def __init__(self, folder: Path, ranks: int, ports: tuple[int, int]) -> None:
        """Starts it.

        Args:
            folder: for its session; removed by whoever made it.
            ports: first and last of those that it may use.

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
        # Declared as text, and used as a truth value.
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
        """What has died of it, and how; None while it lives."""
        words = {"gcs_server": "Ray's head (gcs_server)", "raylet": "Ray's node agent (raylet)"}
        for name, known in words.items():
            for each in self._node.all_processes.get(name, ()):
                status = each.process.poll()
                if status is not None:
                    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"
                    return f"{known} {how}"
        return None


class JoinedRay:
    """This machine as a node of a cluster, for as long as the driver lives. No rank is placed on it.

    Ray's drivers speak to a node agent of their own machine. Where one runs here, this is a second one.
    """

    def __init__(self, address: str, folder: Path, patience: float) -> None:
        """Joins it.

        Args:
            address: HOST:PORT of its head.
            folder: for what the node agent writes, where the cluster's own folder does not say otherwise.
            patience: seconds for which the head is asked: on a cluster its pod may start after this one.

        Raises:
            CollectiveError: (81) there is no head, or it is of another version of Ray or Python.
            OutOfMemoryError: (79) /dev/shm has no room for the object store.
            StorageError: (74) the disk is full.
        """
        from ray._private.node import Node
        from ray._private.parameter import RayParams

        check_shared_memory()
        check_disk(folder)
        _await_head(address, patience)
        # Declared as text, and used as a truth value; a free port, because another node agent may have Ray's own.
        fixed: dict[str, Any] = {"include_log_monitor": False, "dashboard_agent_listen_port": None}
        params = RayParams(
            **fixed, gcs_address=address, num_cpus=0, num_gpus=0, object_store_memory=STORE_BYTES,
            include_dashboard=False, no_monitor=True,
        )  # fmt: skip
        with _patient({}):
            self._node = Node(params, head=False, shutdown_at_exit=False, spawn_reaper=True)


def _await_head(address: str, patience: float) -> None:
    """Until it takes connections. A name may be unknown until its pod is there."""
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
    """Within it a node agent starts, however busy the machine is, and Ray waits for it as long as it lives.

    Two numbers in Ray's code are not enough at a load of 13 on two cores, and whoever then starts again throws away
    what was started, so that no start ever ends: after 15 s the node agent ends itself because its helpers have not
    told their ports yet (`node_manager.cc`, "Timed out waiting for file"), after 30 s Ray gives up the node agent. The
    ports are known before, so they are told in the helpers' place.

    Args:
        ports: of `RayParams`, those that are fixed.
    """
    # Neither tells types.
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
    """A process below this one that nobody has waited for yet, or none is there."""
    states = []
    for pid in descendants(os.getpid()):
        with suppress(OSError, IndexError):
            head, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
            if head.partition("(")[2] == name:
                states.append(rest.split()[0])
    return not states or "Z" in states


def port_block(ranks: int) -> tuple[tuple[int, int], int]:
    """A range of free ports, and a descriptor that keeps it from other runs on this machine while it is open.

    Raises OutputError (73) where no block is free.
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
    """Raises OutputError (73) for the first that is taken: Ray would wait a minute and not say why."""
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
    """Raises OutOfMemoryError (79) where the object store does not fit."""
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
    """Raises StorageError (74) where the disk has no room for sockets and logs."""
    status = os.statvfs(folder)
    if status.f_bavail * status.f_frsize < least:
        raise StorageError(
            f"the disk is full: {status.f_bavail * status.f_frsize >> 20} MiB free for the ranks' logs",
            where=str(folder),
            fix="free some space, or set TMPDIR to a folder on another disk",
        )
