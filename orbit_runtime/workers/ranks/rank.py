"""The process of one rank: log, stacks, environment, the target's object, its methods, and notes of what it does.

Belongs here: everything inside a rank, and how its failures are worded. A note (stage, step, collective) is written
where it can be read after the rank's death; it costs one small write, so a trainer can afford one for each collective.
Does not belong here: torch (the target imports it), or what a failure means for the run (`verdict`).
"""

from __future__ import annotations

import errno
import faulthandler
import importlib
import json
import os
import pickle
import re
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from orbit_runtime.errors import (
    CollectiveError,
    InternalError,
    OrbitError,
    OutOfMemoryError,
    StorageError,
    gpu_fault,
    is_out_of_memory,
)
from orbit_runtime.workers.child.process import dump_stacks_on_signal

LENGTH = 512
LISTENER_VARIABLE = "ORBIT_RENDEZVOUS_FD"
"""Variable of rank 0: a listening socket at MASTER_ADDR:MASTER_PORT, for `TCPStore(master_listen_fd=...)`."""
_C10D = "torch/distributed/distributed_c10d.py"
_COLLECTIVE_WORDS = ("gloo", "nccl", "ProcessGroup", "c10d", "Connection closed by peer", "TCPStore", "Broken pipe")


@dataclass(frozen=True, slots=True)
class RankNote:
    """What a rank last reported of its progress."""

    stage: str | None = None
    """Such as `train`; the name of the called method unless the rank is more specific."""
    step: int | None = None
    """The last step that it began."""
    collective: str | None = None
    """The collective that it waits in."""
    count: int = 0
    """Number of notes so far: if it does not change for long, the rank makes no progress."""


class _Writer:
    def __init__(self) -> None:
        self.file: int | None = None
        self.last = RankNote()

    def write(self, note: RankNote) -> None:
        self.last = replace(note, count=self.last.count + 1)
        if self.file is not None:
            line = json.dumps(asdict(self.last)).encode()[: LENGTH - 1]
            # A full disk must not end a rank that only reports its state.
            with suppress(OSError):
                os.pwrite(self.file, line.ljust(LENGTH), 0)


_writer = _Writer()


def keep_notes(path: Path) -> None:
    """Writes this process's notes to this file from now on."""
    _writer.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    _writer.write(RankNote())


def note(*, stage: str | None = None, step: int | None = None) -> None:
    """Notes what this rank does now; arguments left out keep their values."""
    last = _writer.last
    _writer.write(replace(last, stage=stage or last.stage, step=last.step if step is None else step))


@contextmanager
def in_collective(name: str) -> Iterator[None]:
    """Notes that this rank waits for the others in a collective. If the block fails, the note stays."""
    before = _writer.last.collective
    _writer.write(replace(_writer.last, collective=name))
    yield
    _writer.write(replace(_writer.last, collective=before))


def read_note(path: Path) -> RankNote:
    """The last note in the file; an empty one if there is none."""
    try:
        return RankNote(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return RankNote()


@dataclass(frozen=True)
class RankFacts:
    """Facts about a rank, known once its process runs."""

    rank: int
    pid: int
    node: str
    """Address of its node."""
    port: int | None = None
    """The port on which rank 0 listens for the others."""


@dataclass(frozen=True)
class RankOrder:
    """The input for building a rank; the same for every rank of a group."""

    target: str
    """`package.module:Class`."""
    arguments: bytes
    """Pickled keyword arguments of the class. Only a rank imports what they need, once its environment is set: torch
    reads the number of threads and the devices when it is imported."""
    count: int
    environment: Mapping[str, str]
    devices: tuple[str, ...] | None
    """Each rank's GPU, numbered as by its node's driver; None for the CPU."""
    path: tuple[str, ...]
    """Additional import path."""
    rendezvous: bool
    """Whether the target connects to the others through torch.distributed."""

    def device(self, rank: int) -> str:
        return "CPU" if self.devices is None else f"GPU {self.devices[rank]}"


@dataclass(frozen=True)
class RankFailure:
    """An exception that ended a call, without its class: only what is meaningful in any process."""

    error: str
    """Name of the `OrbitError`."""
    message: str
    where: str | None
    fix: str | None
    trace: str
    collective: str | None = None


class RankActor:
    """One rank, inside its own process, as Ray's actor. Its calls run one after the other in the main thread."""

    def __init__(self, rank: int, folder: str) -> None:
        """Redirects everything it prints to `folder/rank-N.log`."""
        self._rank = rank
        self._object: Any = None
        self._listener: socket.socket | None = None
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        with open(place / f"rank-{rank}.log", "ab", buffering=0) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        keep_notes(place / f"rank-{rank}.note")
        faulthandler.enable(2)
        self._stacks = open(place / f"rank-{rank}.stacks", "ab", buffering=0)  # noqa: SIM115 (open as long as the rank)
        dump_stacks_on_signal(self._stacks.fileno())

    def introduce(self, node: str | None = None) -> RankFacts:
        """Reports the rank's facts. Rank 0 starts listening for the others, on a port that no other process can take.

        Args: node: its address; None to ask Ray.
        """
        if node is None:
            import ray

            node = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        port = None
        if self._rank == 0:
            self._listener = socket.create_server((node, 0), backlog=1024)
            port = int(self._listener.getsockname()[1])
        return RankFacts(self._rank, os.getpid(), node, port)

    def introduce_node(self) -> str:
        """Ray's id of the node."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def build(self, order: bytes, master: tuple[str, int]) -> bytes | RankFailure:
        """Makes the target's object. Returns the same as `run`."""
        try:
            made: RankOrder = pickle.loads(order)
            sys.path += [folder for folder in made.path if folder not in sys.path]
            os.environ.update(made.environment)
            self._set_places(made, master)
            note(stage="start")
            module, _, name = made.target.partition(":")
            self._object = getattr(importlib.import_module(module), name)(**pickle.loads(made.arguments))
        except BaseException as error:
            return describe(error)
        return pickle.dumps(None)

    def _set_places(self, order: RankOrder, master: tuple[str, int]) -> None:
        if order.devices is not None:
            os.environ.update(CUDA_VISIBLE_DEVICES=order.devices[self._rank])
        os.environ.update(RANK=str(self._rank), WORLD_SIZE=str(order.count), LOCAL_RANK="0")
        if not order.rendezvous:
            return
        os.environ.update(MASTER_ADDR=master[0], MASTER_PORT=str(master[1]))
        if self._listener is not None:
            os.environ[LISTENER_VARIABLE] = str(self._listener.detach())
            self._listener = None

    def run(self, method: str, arguments: bytes) -> bytes | RankFailure:
        """The method's pickled result, or why there is none. Raises nothing."""
        try:
            note(stage=method)
            return pickle.dumps(getattr(self._object, method)(*pickle.loads(arguments)), protocol=5)
        except BaseException as error:
            return describe(error)


def describe(error: BaseException) -> RankFailure:
    """An `OrbitError` keeps its class; other errors become the class that says who must act."""
    trace = "".join(traceback.format_exception(error))
    sys.stderr.write(trace)
    collective = collective_of(trace)
    if not isinstance(error, OrbitError):
        error = _translate(error, trace, collective)
    return RankFailure(type(error).__name__, error.message, error.where, error.fix, trace, collective)


def _translate(error: BaseException, trace: str, collective: str | None) -> OrbitError:
    said = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
    if is_out_of_memory(error):
        return OutOfMemoryError(
            f"memory ran out: {said}",
            where="spec.training.microBatchTokens",
            fix="lower it, or use more ranks (training.parallel) or more memory",
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"the disk is full: {error.strerror}", where=error.filename, fix="free some space")
    if (fault := gpu_fault(error)) is not None:
        return fault
    names = {each.__name__ for each in type(error).__mro__}
    of_collectives = names & {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}
    if of_collectives or (isinstance(error, RuntimeError) and any(words in str(error) for words in _COLLECTIVE_WORDS)):
        return CollectiveError(f"{collective or 'a collective'} failed: {said}")
    return InternalError(said)


def collective_of(trace: str) -> str | None:
    """The torch.distributed collective in a traceback or a stack dump, if any."""
    lines = re.findall(rf'File "[^"]*{re.escape(_C10D)}", line \d+,? in (\w+)', trace)
    # Torch wraps each in a decorator.
    return next((name for name in lines if name not in ("wrapper", "inner", "_exception_logger")), None)


def tail(path: Path, lines: int = 20, longest: int = 300) -> Sequence[str]:
    """The last non-empty lines of a log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return [f"it cannot be read: {error}"]
    return [line[:longest] for line in text.splitlines() if line.strip()][-lines:]
