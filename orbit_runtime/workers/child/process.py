"""A child process from both sides: how it is started and ended, the messages in its pipes, its stacks, what it prints.

Belongs here: what is the same for every kind. Does not belong here: what a child is told, or when it counts as
stopped.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import hmac
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orbit_runtime.workers.child.run_token import SERVE_VARIABLE, SERVICE_VARIABLE, UPDATE_VARIABLE

if TYPE_CHECKING:
    # A reward worker, which reads by blocking, starts without it.
    import asyncio

PACKAGE_ROOT = str(Path(__file__).parents[3])
"""The folder that Orbit is imported from."""
STACK_SIGNAL = signal.SIGUSR2
STACK_SECONDS = 1.0
"""Limit for writing the stacks; a process that is stopped in the kernel writes nothing."""
MAX_STACK = 1 << 14
"""Bytes of stacks to keep."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK_SECONDS = 0.02
KILL_SECONDS = 10.0
"""Limit for ending everything below a process."""
HEADER = 4
"""Bytes before each message in a pipe."""

_PASSED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|HOSTNAME|PWD|TERM|COLUMNS|LINES|NO_COLOR|LANG|LANGUAGE|LC_\w+|TZ|TZDIR|TMPDIR|TEMP|TMP"
    r"|XDG_\w+|PYTHON\w*|VIRTUAL_ENV|CONDA_PREFIX|COVERAGE_\w+|LD_\w+|DYLD_\w+|MALLOC_\w+|GLIBC_TUNABLES"
    r"|(OMP|KMP|GOMP|MKL|OPENBLAS|BLIS|NUMEXPR|VECLIB|RAYON|TOKENIZERS|CUDA|NVIDIA|TRITON|TORCH|TORCHINDUCTOR)_\w+"
    r"|CC|CXX|(HF|TRANSFORMERS|TORCH|NLTK)_(\w+_)?(HOME|CACHE|DATA|OFFLINE|ENDPOINT)"
    r"|((http|https|ftp|all|no)_proxy)|((HTTP|HTTPS|FTP|ALL|NO)_PROXY)|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE"
    r"|ORBIT_(ATTEMPT|CACHE|KERNELS|TOKEN_FILE)"
)
"""Variables that code of a user gets without asking. `ORBIT_TOKEN_FILE` names a file that `confine` then hides."""

# --- from the parent's side ---


def start_module(
    module: str, *arguments: object, variables: Iterable[str], pass_fds: Sequence[int] = (), **streams: Any
) -> subprocess.Popen[bytes]:
    """Starts `python -P -m module`, in a group of its own: killed whole, and Ctrl-C of the terminal does not reach it.

    Args:
        variables: see `child_environment`.
        streams: `stdin`, `stdout` and `stderr`, as `Popen` takes them.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, arguments)],
        pass_fds=pass_fds, env=child_environment(variables), start_new_session=True, **streams,
    )  # fmt: skip


def child_environment(variables: Iterable[str]) -> dict[str, str]:
    """The environment of a process that runs a user's code: what tells of the machine and no secret, with Orbit
    importable and without a thread pool in every worker.

    Args: variables: others that it gets too. The tokens of Orbit's ports never pass.
    """
    inherited = os.environ.get("PYTHONPATH")
    named = set(variables) - {SERVE_VARIABLE, SERVICE_VARIABLE, UPDATE_VARIABLE}
    return {
        "OMP_NUM_THREADS": "1",
        **{name: value for name, value in os.environ.items() if name in named or _PASSED.fullmatch(name)},
        "PYTHONPATH": os.pathsep.join([*([inherited] if inherited else []), PACKAGE_ROOT]),
    }


def import_path(folders: Sequence[str] = ()) -> list[str]:
    """These folders, followed by this process's import path."""
    return list(dict.fromkeys([*folders, *(folder or os.getcwd() for folder in sys.path)]))


def kill_group(pid: int) -> None:
    """Kills a child and everything that is still in its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def end_guarded(process: subprocess.Popen[bytes]) -> None:
    """Ends a child that called `guard`, and everything that it started. Safe to call twice."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_SECONDS)
    kill_group(process.pid)
    process.wait()


def end_all(ancestor: int) -> None:
    """Kills and reaps every process below this one until none is left."""
    until = time.monotonic() + KILL_SECONDS
    while (alive := descendants(ancestor)) and time.monotonic() < until:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def descendants(ancestor: int) -> list[int]:
    """All processes below this one."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = list(children.get(ancestor, ()))
    for pid in found:
        found += children.get(pid, ())
    return found


def describe_exit(code: int, killed: str = "was ended by", ended: str = "exited with") -> str:
    """Args: code: as `Popen.wait` returns it."""
    return f"{killed} {signal.Signals(-code).name}" if code < 0 else f"{ended} {code}"


class Stacks:
    """File for the stacks of one other process, which is given its `fd`."""

    def __init__(self) -> None:
        # Imported here, because a process that only writes stacks does not need it and should start fast.
        import tempfile

        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        self.fd = self._file.fileno()

    def ask(self, pid: int) -> str:
        """Waits until the stacks are complete; empty if the process writes none. The process must be a child that was
        not waited for, so its id cannot belong to another."""
        before = os.fstat(self.fd).st_size
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, STACK_SIGNAL)
            until, size = time.monotonic() + STACK_SECONDS, before
            while time.monotonic() < until:
                time.sleep(_LOOK_SECONDS)
                last, size = size, os.fstat(self.fd).st_size
                if size == last > before:
                    break
        return os.pread(self.fd, MAX_STACK, before).decode(errors="replace")

    def close(self) -> None:
        self._file.close()


class OutputRelay:
    """Passes everything that processes of one kind print on to standard error, up to a limit, which is reported once.

    Args:
        who: whose output it is, in the plural, such as `rewards`.
        limit: bytes that are passed on.
    """

    def __init__(self, who: str, limit: int) -> None:
        self._who = who
        self._limit = limit
        self._seen = 0

    def pass_on(self, data: bytes) -> None:
        """Writes the part of `data` that is within the limit to standard error."""
        before, self._seen = self._seen, self._seen + len(data)
        # Standard error may be gone: prints are no reason to end a run.
        with contextlib.suppress(OSError):
            write_all(2, data[: max(0, self._limit - before)])
            if before <= self._limit < self._seen:
                write_all(
                    2,
                    f"\n({self._who} printed too much: of what they print from now on, nothing is shown. "
                    f"{self._limit >> 10} KiB are shown; write what is to be kept to a file)\n".encode(),
                )


# --- from inside ---


def guard(parent_pid: int) -> None:
    """Goes on in a child process, in a session of its own. This process stays, and guards the child: however the child
    ends, and if the parent ends or `end_guarded` asks, it kills everything that the child started, also what left the
    child's session, and ends as the child did.
    """
    if sys.platform != "linux":
        return end_with_parent(parent_pid)
    adopt_orphans()
    own = os.getpid()
    child = os.fork()
    if not child:
        os.setsid()
        return end_with_parent(own)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.signal(STACK_SIGNAL, lambda *_: os.kill(child, STACK_SIGNAL))
    end_with_parent(parent_pid, signal.SIGTERM)
    # The other ends of the child's pipes must see when it closes them.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    # Not reaped before the rest is killed, so that its id is no other process's.
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) and ended.si_pid != child:
        os.waitpid(ended.si_pid, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)
    end_all(own)
    assert ended is not None
    if ended.si_code != os.CLD_EXITED:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(ended.si_status, signal.SIG_DFL)
        os.kill(own, ended.si_status)
    os._exit(ended.si_status)


def end_with_parent(parent_pid: int, by: int = signal.SIGKILL) -> None:
    """Makes this process die with its parent, also if the parent is killed, and also while it loops. Args: by: the
    signal that it gets, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, by, 0, 0, 0)
    else:
        threading.Thread(target=_watch_parent, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:  # it was gone before the request stood
        os._exit(0)


def _watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(1.0)
    os._exit(0)


def adopt_orphans() -> None:
    """Whatever a child of this process leaves behind becomes this process's child instead of init's."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def dump_stacks_on_signal(fd: int) -> None:
    """Makes this process write its threads' stacks to `fd` on the signal. They are written from C, so code that never
    returns to the interpreter does not prevent it.
    """
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True)


def thread_stack(thread: threading.Thread) -> str:
    """Stack of a thread of this process; empty once it has ended."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame))[-MAX_STACK:] if frame is not None else ""


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


# --- messages in a pipe: each is 4 bytes of length, big-endian, then its body ---


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(HEADER, "big") + body


def read_frame(read: Callable[[int], bytes]) -> bytes | None:
    """The next body, or None at the end of the stream. Args: read: blocks until it has so many bytes, or the stream
    ends."""
    header = read(HEADER)
    if len(header) < HEADER:
        return None
    size = int.from_bytes(header, "big")
    body = read(size)
    return body if len(body) == size else None


async def receive_frame(reader: asyncio.StreamReader, most: int = 1 << 32) -> bytes:
    """The next body. Raises asyncio.IncompleteReadError at the end of the stream, ValueError for one of more than
    `most` bytes."""
    size = int.from_bytes(await reader.readexactly(HEADER), "big")
    if size > most:
        raise ValueError(f"a message of {size} bytes")
    return await reader.readexactly(size)


class Seal:
    """Tells the messages of a child from what code of a user writes into the same pipe: each carries a mark that only
    who has the key can make, and no two are alike. Both ends have one; the key is in their memory and nowhere else.
    """

    def __init__(self, key: str = "") -> None:
        """Args: key: the other end's; a new one if empty."""
        self.key = key or os.urandom(16).hex()
        self._number = 0

    def close(self, body: bytes) -> bytes:
        """The message to send."""
        self._number += 1
        return hmac.digest(self.key.encode(), b"%d " % self._number + body, "sha256").hex().encode() + b" " + body

    def open(self, message: bytes) -> bytes:
        """Its body. Raises ValueError for what the other end has not sent, or not as its next message."""
        if not hmac.compare_digest(self.close(body := message.partition(b" ")[2]), message):
            raise ValueError("written by another")
        return body


class Frames:
    """Bodies out of bytes that arrive in any pieces."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that are complete with this piece."""
        self._unread += data
        found, start = [], 0
        while len(self._unread) >= start + HEADER:
            begin = start + HEADER
            end = begin + int.from_bytes(self._unread[start:begin], "big")
            if len(self._unread) < end:
                break
            found.append(bytes(self._unread[begin:end]))
            start = end
        del self._unread[:start]
        return found
