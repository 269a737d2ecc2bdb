"""Errors that end a run: one exception per exit code, each with what is wrong, where, and what to do.

Belongs here: `OrbitError`, its children and the exit codes of the command line and the pod.
Does not belong here: printing (`cli`), or deciding when to retry (`storage`, the operator).
"""

from __future__ import annotations

import errno
import re
from typing import ClassVar

EXIT_DONE = 0
EXIT_STOPPED = 75


class OrbitError(Exception):
    """A failure with an owner. `str(error)` is one message: what is wrong, where, and what to do.

    Args:
        message: what is wrong, in one sentence, with the offending value.
        where: the field path, file or line that it concerns, or `None`.
        fix: what the reader can do about it, or `None` where the message already says it.
    """

    exit_code: ClassVar[int] = 70
    who_acts: ClassVar[str] = "orbit"
    """Who must act: `user`, `cluster`, `hardware` or `orbit`."""

    def __init__(self, message: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.message = message
        self.where = where
        self.fix = fix
        self.about: dict[str, str | int] = {}
        """Facts about where among ranks it happened, if known: `rank, device, stage, collective, last_step`."""
        super().__init__(message)

    def __str__(self) -> str:
        head = f"{self.where}: {self.message}" if self.where else self.message
        return f"{head}\n  fix: {self.fix}" if self.fix else head

    def to_json(self) -> dict[str, object]:
        """The same facts as a JSON object: `error, exit_code, who_acts, message, where, fix`, and those of `about`."""
        return {
            "error": type(self).__name__,
            "exit_code": self.exit_code,
            "who_acts": self.who_acts,
            "message": self.message,
            "where": self.where,
            "fix": self.fix,
            **self.about,
        }


class UsageError(OrbitError):
    """The command line was not understood, or a value in it is impossible."""

    exit_code = 64
    who_acts = "user"


_MAX_PROBLEMS, _MAX_QUOTED, _MAX_WORD = 50, 300, 4096


def _quoted(text: str) -> str:
    """A text of an error about a manifest, in which each quoted value is cut, and no password of an address shown."""
    text = re.sub(r"://[^\s/`@]*:[^\s/`@]*@", "://***@", text)
    return re.sub(rf"`[^`]*`|\S{{{_MAX_WORD},}}", lambda found: _cut(found[0]), text)


def _cut(quoted: str) -> str:
    return quoted if len(quoted) <= _MAX_QUOTED else f"{quoted[:_MAX_QUOTED]}…{quoted[-1]}"


class ManifestError(OrbitError):
    """The manifest is wrong; `problems` lists every finding of the file, not only the first."""

    exit_code = 64
    who_acts = "user"

    def __init__(
        self,
        message: str,
        *,
        where: str | None = None,
        fix: str | None = None,
        problems: tuple[OrbitError, ...] = (),
    ) -> None:
        super().__init__(_quoted(message), where=where and _quoted(where), fix=fix and _quoted(fix))
        self.problems = problems

    def __str__(self) -> str:
        shown, left = self.problems[:_MAX_PROBLEMS], len(self.problems) - _MAX_PROBLEMS
        return "\n".join([super().__str__(), *map(str, shown), *([f"… and {left} more"] if left > 0 else [])])

    def to_json(self) -> dict[str, object]:
        return {**super().to_json(), "problems": [problem.to_json() for problem in self.problems]}


class DataError(OrbitError):
    """Prompts are missing, empty or malformed."""

    exit_code = 65
    who_acts = "user"


class ModelError(OrbitError):
    """The model folder is missing, incomplete, corrupt, or of a kind Orbit does not read."""

    exit_code = 66
    who_acts = "user"


class InternalError(OrbitError):
    """A bug in Orbit."""

    exit_code = 70
    who_acts = "orbit"


class OutputError(OrbitError):
    """The run folder is in use by a live run, cannot be created, or holds another run."""

    exit_code = 73
    who_acts = "user"


class StorageError(OrbitError):
    """The object store or the disk failed after retries, or has no such bucket; nothing half-written is visible."""

    exit_code = 74
    who_acts = "cluster"


class StoppedOnRequest(OrbitError):
    """SIGINT or SIGTERM was honoured: the run is checkpointed and continues when started again."""

    exit_code = EXIT_STOPPED
    who_acts = "none"


class CredentialsError(OrbitError):
    """The store or hub refused the credentials."""

    exit_code = 77
    who_acts = "user"


class UnsupportedError(OrbitError):
    """It does not fit, or this combination is not supported here."""

    exit_code = 78
    who_acts = "user"


class OutOfMemoryError(OrbitError):
    """Host or device memory ran out."""

    exit_code = 79
    who_acts = "user"


_NO_ROOM = "failed to map segment from shared object"
_NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "bad_alloc")


def says_no_memory(text: str) -> bool:
    """Whether a message is about memory that ran out, in the words of torch, CUDA, SGLang, C++ or the kernel."""
    return any(words in text.lower() for words in _NO_MEMORY)


def is_out_of_memory(error: BaseException) -> bool:
    """Python's MemoryError, torch's on any device (a RuntimeError), the system's ENOMEM, or a library that finds no
    room."""
    if isinstance(error, MemoryError) or (isinstance(error, ImportError) and str(error).endswith(_NO_ROOM)):
        return True
    return isinstance(error, RuntimeError | OSError) and says_no_memory(str(error))


def too_many_files(error: BaseException | None) -> bool:
    """Whether the error, or one that led to it, is that this process may open no more files."""
    is_it = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    return is_it or (error is not None and too_many_files(error.__cause__ or error.__context__))


class GPUFaultError(OrbitError):
    """A GPU reported an error of its own."""

    exit_code = 80
    who_acts = "hardware"


_GPU_FAULTS = ("CUDA error", "cudaError", "uncorrectable ECC", "HIP error", "Xid")


def gpu_fault(error: BaseException) -> GPUFaultError | None:
    """The fault of a GPU that torch's error reports; None for any other error, memory that ran out among them."""
    said = str(error)
    if not isinstance(error, RuntimeError) or is_out_of_memory(error) or not any(map(said.__contains__, _GPU_FAULTS)):
        return None
    first = f"{type(error).__name__}: {said.strip().splitlines()[0][:300]}"
    return GPUFaultError(first, fix="look for Xid errors in the node's kernel log (dmesg)")


class CollectiveError(OrbitError):
    """A trainer rank or its node was lost, or a collective among ranks failed."""

    exit_code = 81
    who_acts = "hardware"


class EngineDiedError(OrbitError):
    """The rollout engine ended or stopped answering."""

    exit_code = 82
    who_acts = "cluster"


class StalledError(OrbitError):
    """No progress within the allowed time."""

    exit_code = 83
    who_acts = "cluster"


class GateError(OrbitError):
    """Parity left its limit, or a publish could not be proven: the run never continues on a policy it cannot prove."""

    exit_code = 84
    who_acts = "user"


class DivergedError(OrbitError):
    """The loss, a gradient or a parameter is NaN or infinite."""

    exit_code = 85
    who_acts = "user"


class RewardsFailingError(OrbitError):
    """More rewards or environments failed than `environment.failureLimit` allows."""

    exit_code = 86
    who_acts = "user"
