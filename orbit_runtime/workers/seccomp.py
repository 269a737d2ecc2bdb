"""System calls that a process gives up for good, with Linux' seccomp filters.

Belongs here: building a filter and applying it to this process and everything that it starts. Does not belong here:
which process gives up what (`environment_cell`, `sandbox`).

Needs no privileges. include/uapi/linux/{seccomp,filter,audit}.h of Linux 6.12.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
import sys
from collections.abc import Collection

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
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, MODE_FILTER = 38, 22, 2


def forbid_processes() -> bool:
    """From now on this process can start threads, but no processes. Returns whether the kernel accepted the filter."""
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
