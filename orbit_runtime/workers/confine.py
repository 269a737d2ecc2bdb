"""Confines user code that runs beside a run, with Linux' Landlock.

Belongs here: confining this process and everything that it starts. Does not belong here: which processes are confined
(`reward_worker`), the token itself (`run_token`).

A confined process may not inspect processes outside (their memory, environment, open files), signal them, or connect to
their abstract sockets; and it reads no file below a hidden folder. This needs no privileges and binds root too. It is
no sandbox for hostile code, which would still share user and network with the run.

Documentation/userspace-api/landlock.rst and include/uapi/linux/landlock.h of Linux 6.12.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

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


def confine_files(readable: Sequence[Path], writable: Sequence[Path]) -> bool:
    """From now on this process sees no files other than these, and no TCP. Returns whether the kernel enforces it.

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
