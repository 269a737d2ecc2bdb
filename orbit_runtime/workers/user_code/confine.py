"""Confines user code that runs beside a run: with Linux' Landlock, and with seccomp filters.

Belongs here: confining this process and everything that it starts, and the system calls that it gives up for good. Does
not belong here: which process is confined how (`reward_worker`, `environment_cell`, `sandbox_child`).

A process confined by Landlock may not inspect processes outside (their memory, environment, open files), signal them,
or connect to their abstract sockets; and it reads no file below a hidden folder. Neither needs privileges, and both
bind root too. They are no sandbox for hostile code, which would still share user and network with the run.

Documentation/userspace-api/landlock.rst, include/uapi/linux/{landlock,seccomp,filter,audit}.h of Linux 6.12.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from orbit_runtime.workers.child.run_token import TOKEN_VARIABLE

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""System calls; the numbers are the same on every architecture."""
VERSION_FLAG = 1
RULE_PATH_BENEATH = 1
READ_FILE, READ_DIR, MAKE_BLOCK = 1 << 2, 1 << 3, 1 << 11
ALL_FILES, EXECUTE, WRITABLE = (1 << 16) - 1, 1 << 0, (1 << 15) - 1 & ~(1 << 0)
"""Every right on files of ABI 5 (including ioctl on devices); the rights in a scratch folder: all but executing files
and ioctl."""
BIND_TCP, CONNECT_TCP = 1 << 0, 1 << 1
NETWORK_SINCE, IOCTL_SINCE = 4, 5
SCOPE_ABSTRACT_SOCKET, SCOPE_SIGNAL = 1 << 0, 1 << 1
SCOPES_SINCE = 6
"""ABI of Linux 6.12. Before it Landlock has only rules on files, and a process that is bound by those may not mount."""
PR_SET_NO_NEW_PRIVS = 38
NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {
        "socket": 41, "socketpair": 53, "connect": 42, "bind": 49, "clone": 56, "fork": 57, "vfork": 58, "execve": 59,
        "ptrace": 101, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "setns": 308, "unshare": 272,
        "keyctl": 250, "add_key": 248, "request_key": 249, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
        "process_vm_readv": 310, "process_vm_writev": 311, "io_uring_setup": 425, "clone3": 435, "execveat": 322,
        "kill": 62, "tkill": 200, "tgkill": 234, "pidfd_open": 434, "pidfd_send_signal": 424, "memfd_create": 319,
        "shmget": 29, "msgget": 68, "semget": 64, "mq_open": 240,
    },
    "aarch64": {
        "socket": 198, "socketpair": 199, "connect": 203, "bind": 200, "clone": 220, "execve": 221, "ptrace": 117,
        "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "setns": 268, "unshare": 97, "keyctl": 219,
        "add_key": 217, "request_key": 218, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
        "process_vm_readv": 270, "process_vm_writev": 271, "io_uring_setup": 425, "clone3": 435, "execveat": 281,
        "kill": 129, "tkill": 130, "tgkill": 131, "pidfd_open": 434, "pidfd_send_signal": 424, "memfd_create": 279,
        "shmget": 194, "msgget": 186, "semget": 190, "mq_open": 180,
    },
}  # fmt: skip
"""Machine → system call → number."""
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000
"""Calls of x86's other ABI have numbers from here on."""
PROCESSES = ("clone", "fork", "vfork", "clone3")
CLONE_THREAD = 0x00010000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
"""Offsets in struct seccomp_data; the low half of the argument, both machines being little-endian."""
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
PR_SET_SECCOMP, MODE_FILTER = 22, 2


def landlock_version() -> int:
    """ABI of this kernel's Landlock; 0 if it has none, or does not allow it here."""
    return max(0, _call(CREATE_RULESET, None, 0, VERSION_FLAG)) if sys.platform == "linux" else 0


def confine(hidden: Path | None = None, *, may_mount: bool = True) -> bool:
    """Confines the calling thread, and every thread and process that it starts from now on.

    Args:
        hidden: a folder whose files must not be read.
        may_mount: code that makes its own sandboxes, such as bubblewrap, must still work. A kernel before 6.12 can then
            confine nothing; `hidden` takes precedence.

    Returns:
        Whether it succeeded; False if the kernel cannot.
    """
    version = landlock_version()
    if not version or (version < SCOPES_SINCE and may_mount and hidden is None):
        return False
    # A ruleset must handle at least one right. No process without privileges makes block devices.
    files = READ_FILE | READ_DIR if hidden else 0 if version >= SCOPES_SINCE else MAKE_BLOCK
    scopes = SCOPE_ABSTRACT_SOCKET | SCOPE_SIGNAL if version >= SCOPES_SINCE else 0
    # struct landlock_ruleset_attr: handled_access_fs, handled_access_net (ABI 4), scoped (ABI 6).
    attributes = struct.pack("=QQQ", files, 0, scopes)[: 24 if version >= SCOPES_SINCE else 8]
    ruleset = _call(CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    try:
        if hidden:
            for path in _beside(hidden.resolve()):
                _allow(ruleset, path, files)
        ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        return _call(RESTRICT_SELF, ruleset, 0) == 0
    finally:
        os.close(ruleset)


def confine_user_code() -> None:
    """Keeps rewards and environments, and what they start, from inspecting processes of run and engine, and from
    reading their token."""
    token = os.environ.pop(TOKEN_VARIABLE, None)
    # In a pod the seccomp profile forbids mounting in any case.
    confine(Path(token).parent if token else None, may_mount="ORBIT_ATTEMPT" not in os.environ)


def confine_files(readable: Sequence[Path], writable: Sequence[Path]) -> bool:
    """Hides all files but these from this process, and forbids TCP. Returns whether the kernel enforces it.

    Args:
        readable: files, and folders with everything below them; missing ones are skipped.
        writable: folders.
    """
    version = landlock_version()
    if version < NETWORK_SINCE:
        return False
    files = ALL_FILES if version >= IOCTL_SINCE else ALL_FILES >> 1
    scopes = SCOPE_ABSTRACT_SOCKET | SCOPE_SIGNAL if version >= SCOPES_SINCE else 0
    attributes = struct.pack("=QQQ", files, BIND_TCP | CONNECT_TCP, scopes)[: 24 if version >= SCOPES_SINCE else 16]
    ruleset = _call(CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    try:
        for path in readable:
            _allow(ruleset, path, READ_FILE | READ_DIR | EXECUTE)
        for path in writable:
            _allow(ruleset, path, files & WRITABLE)
        ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        return _call(RESTRICT_SELF, ruleset, 0) == 0
    finally:
        os.close(ruleset)


def _beside(hidden: Path) -> list[Path]:
    """Everything that exists except `hidden`: its siblings, and the siblings of each folder above it.

    Siblings created later are not included: keep `hidden` in a folder of its own below the root.
    """
    found = []
    inner = hidden
    for folder in hidden.parents:
        found += [path for path in folder.iterdir() if path != inner]
        inner = folder
    return found


def _allow(ruleset: int, path: Path, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        kept = access if path.is_dir() else access & ~READ_DIR
        # struct landlock_path_beneath_attr, which is packed: allowed_access, parent_fd.
        _call(ADD_RULE, ruleset, RULE_PATH_BENEATH, struct.pack("=Qi", kept, descriptor), 0)
    finally:
        os.close(descriptor)


def _call(number: int, *arguments: bytes | int | None) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(ctypes.c_long(number), *(_word(each) for each in arguments)))


def _word(value: bytes | int | None) -> ctypes.c_char_p | ctypes.c_long:
    return ctypes.c_long(value) if isinstance(value, int) else ctypes.c_char_p(value)


def forbid_processes() -> bool:
    """Forbids this process to start processes; threads remain allowed. Returns whether the kernel
    accepted the filter.
    """
    return forbid(())


def forbid(names: Collection[str]) -> bool:
    """Makes these calls, and starting processes, fail with EPERM. Returns whether the kernel accepted the filter."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in NUMBERS:
        return False
    filters = build_filter(machine, names)
    program = (ctypes.c_char * len(filters)).from_buffer_copy(filters)
    # struct sock_fprog: unsigned short len, then a pointer.
    head = struct.pack("@HP", len(filters) // 8, ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return bool(libc.prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.c_char_p(head), 0, 0) == 0)


def build_filter(machine: str, names: Collection[str]) -> bytes:
    """Array of struct sock_filter. A call of another architecture ends the process: its numbers mean other things."""
    numbers = NUMBERS[machine]
    steps = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
    ]
    if machine == "x86_64":
        steps += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)]
    for name in sorted({*names, "fork", "vfork"} & numbers.keys()):
        steps += [(EQUAL, 0, 1, numbers[name]), (RETURN, 0, 0, ERRNO | errno.EPERM)]
    # clone3's arguments are in memory, where a filter cannot look: on ENOSYS the C library falls back to clone.
    steps += [(EQUAL, 0, 1, numbers["clone3"]), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    steps += [
        (EQUAL, 0, 4, numbers["clone"]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (ANY_BIT, 0, 1, CLONE_THREAD),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, ERRNO | errno.EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
