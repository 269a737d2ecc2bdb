"""The process that untrusted Python runs in: `python -m orbit_runtime.workers.user_code.sandbox_child`.

It fails closed: if any lock fails, it reports that and runs nothing.

In: one line of JSON `{"program", "token", "scratch", "limits"}`, then the program's standard input.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

from orbit_runtime.workers.child.process import end_with_parent
from orbit_runtime.workers.user_code.confine import confine_files, forbid

FORBIDDEN = (
    "socket", "socketpair", "connect", "bind", "execve", "execveat", "ptrace", "mount", "umount2", "pivot_root",
    "chroot", "setns", "unshare", "keyctl", "add_key", "request_key", "bpf", "perf_event_open", "userfaultfd",
    "process_vm_readv", "process_vm_writev", "io_uring_setup", "kill", "tkill", "tgkill", "pidfd_open",
    "pidfd_send_signal", "memfd_create", "shmget", "msgget", "semget", "mq_open",
)  # fmt: skip


def main() -> None:
    end_with_parent(os.getppid())
    line = bytearray()
    # Byte by byte, because what follows is the program's own input.
    while (byte := os.read(0, 1)) and byte != b"\n":
        line += byte
    head = json.loads(line)
    try:
        lock_up(Path(head["scratch"]), head["limits"])
    except (OSError, ValueError) as error:
        os.write(2, f"unlocked {error}\n".encode())
        os._exit(1)
    os.write(2, b"locked\n")
    run(head["program"], head["token"])


def lock_up(scratch: Path, limits: dict[str, Any]) -> None:
    """Raises OSError if the machine does not support it."""
    seconds = math.ceil(limits["seconds"])
    for kind, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_DATA, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    # It may not be inspected by other sandboxes, nor dumped.
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    paths = {Path(path) for path in sys.path if path} | {Path(sys.base_prefix), Path(sys.prefix)}
    paths |= {Path(path) for path in sysconfig.get_paths().values()}
    readable = [*paths, *map(Path, ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/dev/null",
                                    "/dev/urandom", "/etc/localtime", "/proc/self/stat"))]  # fmt: skip
    if not confine_files(readable, [scratch]):
        raise OSError("this kernel has no Landlock that keeps files and network away (Linux 6.7), or does not allow it")
    if not forbid(FORBIDDEN):
        raise OSError("this kernel has no seccomp filters, or does not allow them")


def run(program: str, token: str) -> None:
    """Runs the program as `__main__`. The token follows only if its last line was run, however it tries to exit."""
    code = 1
    # Taken before the program can replace these functions.
    write, leave, print_exception = os.write, os._exit, traceback.print_exc
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
        code = 0
    except BaseException:
        with contextlib.suppress(BaseException):
            print_exception(limit=-5)
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    if code == 0:
        write(2, f"\n{token}\n".encode())
    leave(code)


if __name__ == "__main__":
    main()
