"""A lock on a local file that the operating system releases when its holder dies."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

_held: set[int] = set()


class LockBusyError(Exception):
    """Another open file description holds the lock: a live process, or this one a second time."""


def take_lock(path: Path) -> int | None:
    """Create and lock a file; returns the handle for `release_lock`, or `None` if the file system has no flock.

    The handle closes on exec and is closed in every forked child: a reward worker that outlives a killed run must not
    keep the folder locked. Closing a child's copy leaves the parent's lock alone.

    Raises:
        LockBusyError: the lock is held.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise LockBusyError from None
        if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return None
        raise
    _held.add(handle)
    return handle


def release_lock(handle: int) -> None:
    """Release the lock. The file stays: removing it would let two processes lock two files of one name."""
    if handle in _held:
        _held.discard(handle)
        os.close(handle)


def _close_in_child() -> None:
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
