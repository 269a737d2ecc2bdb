"""Main memory of this machine or container, as the kernel reports it."""

from __future__ import annotations

import os
from pathlib import Path


def usable_memory() -> int | None:
    """Bytes of main memory, or the control group's limit if that is lower; None if neither can be read."""
    try:
        total: int | None = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        total = None
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = int(Path(path).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
        return limit if total is None else min(total, limit)
    return total
