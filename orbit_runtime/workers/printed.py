"""What a user's code prints: passed on to standard error, up to a limit.

Belongs here: the limit. Does not belong here: pipes and processes (`reward_pool`, `environment_pool`).
"""

from __future__ import annotations

import contextlib
import os


class Printed:
    """The output of all processes of one kind. What is beyond the limit is dropped, and the limit said once.

    Args:
        who: whose output it is, in the plural, such as `rewards`.
        limit: bytes that are passed on.
    """

    def __init__(self, who: str, limit: int) -> None:
        self._who = who
        self._limit = limit
        self._seen = 0

    def pass_on(self, data: bytes) -> None:
        """Writes the part of it that is within the limit to standard error."""
        before, self._seen = self._seen, self._seen + len(data)
        # Standard error may be gone: prints are no reason to end a run.
        with contextlib.suppress(OSError):
            _write(data[: max(0, self._limit - before)])
            if before <= self._limit < self._seen:
                _write(
                    f"\n({self._who} printed too much: of what they print from now on, nothing is shown. "
                    f"{self._limit >> 10} KiB are shown; write what is to be kept to a file)\n".encode()
                )


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(2, data) :]
