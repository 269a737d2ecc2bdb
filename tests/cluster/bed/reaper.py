"""Removes what is left of a bed when the tests that started it are killed.

Belongs here: the process that outlives the tests, and its start. Does not belong here: what there is to remove
(`cleanup`). Servers end with the tests by themselves (`processes`); containers, mounts and devices do not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from cluster.bed.cleanup import remove_leftovers

TESTS = Path(__file__).parents[2]


@contextmanager
def reap_after_us(lock: IO[str]) -> Iterator[None]:
    """A bed that is held within this block ends with this process, however that ends.

    The reaper holds the lock as well, so that nobody starts another bed while it cleans up.
    """
    reaper = subprocess.Popen(
        [sys.executable, "-m", "cluster.bed.reaper"], stdin=subprocess.PIPE, pass_fds=[lock.fileno()],
        # A session of its own: what is sent to the tests' whole group does not reach it.
        start_new_session=True, env={**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"},
    )  # fmt: skip
    assert reaper.stdin is not None
    try:
        yield
    finally:
        reaper.stdin.close()
        reaper.wait(60)


def main() -> None:
    """Waits for the end of standard input, whose other end only the tests have."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    remove_leftovers()


if __name__ == "__main__":
    main()
