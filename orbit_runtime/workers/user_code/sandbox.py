"""Runs untrusted Python, such as a policy writes, in a process that can do nothing but compute."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Literal

from orbit_runtime.workers.child.process import PACKAGE_ROOT, kill_group

CHILD_MODULE = "orbit_runtime.workers.user_code.sandbox_child"
CLEAN = {
    "PYTHONPATH": PACKAGE_ROOT,
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}
LOCKED, UNLOCKED = b"locked\n", b"unlocked "
"""First line on standard error: the program's output follows, or the reason why it was not run."""


class SandboxUnavailable(Exception):
    """This machine cannot lock a process up as required: nothing was run."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of one program."""

    seconds: float = 5.0
    """Wall-clock time; the same CPU time, rounded up."""
    memory_bytes: int = 256 << 20
    output_bytes: int = 1 << 16
    """Limit for standard output; a program that prints more is ended."""
    file_bytes: int = 1 << 24
    """Maximum size of any file in its scratch folder."""


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """The end of a program."""

    ended: Literal["done", "failed", "timeout", "output"]
    """`done`: its last line was run, which it cannot claim by itself. `failed`: it raised, exited or was killed."""
    output: str
    errors: str
    """The end of its standard error."""


def run_program(program: str, stdin: str = "", limits: SandboxLimits | None = None) -> SandboxResult:
    """Runs Python source in a fresh interpreter with the standard library and installed packages, without arguments.

    It has no network, starts no processes and sends no signals. It reads Python's own files and a scratch folder, and
    writes only into that folder, which is removed afterwards.

    Raises:
        SandboxUnavailable: the kernel lacks Landlock or seccomp, or does not allow them here.
    """
    limits = limits or SandboxLimits()
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="orbit-sandbox-") as scratch:
        process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-m", CHILD_MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=scratch,
            # Nothing of the run's environment, which holds keys and addresses.
            env={**CLEAN, "HOME": scratch, "TMPDIR": scratch},
            start_new_session=True,
        )
        head = {"program": program, "token": token, "scratch": scratch, "limits": asdict(limits)}
        try:
            is_over, output, errors = _exchange(process, json.dumps(head).encode() + b"\n" + stdin.encode(), limits)
        finally:
            kill_group(process.pid)
            code = process.wait()
    first, _, rest = errors.partition(b"\n")
    if first + b"\n" != LOCKED:
        if is_over == "timeout":
            return SandboxResult("timeout", "", "")
        why = first.removeprefix(UNLOCKED).decode(errors="replace") or f"the process exited with {code}"
        raise SandboxUnavailable(why)
    text = output.decode(errors="replace")
    mark = f"\n{token}\n"
    is_done = rest.decode(errors="replace").endswith(mark) and code == 0
    said = rest.decode(errors="replace").removesuffix(mark)[-2000:]
    if is_over:
        return SandboxResult(is_over, text, said)
    return SandboxResult("done" if is_done else "failed", text, said or ("" if is_done else f"it ended with {code}"))


def _exchange(
    process: subprocess.Popen[bytes], data: bytes, limits: SandboxLimits
) -> tuple[Literal["timeout", "output"] | None, bytes, bytes]:
    """Writes and reads until both outputs are closed or a limit is reached, and returns which limit."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    deadline = time.monotonic() + limits.seconds + 1.0  # starting an interpreter is not the program's doing
    found = {process.stdout: bytearray(), process.stderr: bytearray()}
    with selectors.DefaultSelector() as selector, process.stdin, process.stdout, process.stderr:
        for stream in found:
            selector.register(stream, selectors.EVENT_READ)
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return "timeout", bytes(found[process.stdout]), bytes(found[process.stderr])
            for key, _ in selector.select(left):
                if key.fileobj is process.stdin:
                    data = _write(process, data)
                    if not data:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fileobj)
                found[key.fileobj] += chunk  # type: ignore[index]
                if len(found[key.fileobj]) > limits.output_bytes:  # type: ignore[index]
                    return "output", bytes(found[process.stdout][: limits.output_bytes]), bytes(found[process.stderr])
    return None, bytes(found[process.stdout]), bytes(found[process.stderr])


def _write(process: subprocess.Popen[bytes], data: bytes) -> bytes:
    """The rest of the data; empty if the process no longer reads."""
    assert process.stdin is not None
    try:
        return data[os.write(process.stdin.fileno(), data) :]
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return b""
