"""The console script `orbit`, which is also `python -m orbit_runtime`."""

from __future__ import annotations

import os
import signal
from types import FrameType

_STOPPED = 75
"""`errors.EXIT_STOPPED`; importing it first would be too late."""


def main() -> None:
    """Never returns: every ending is an exit code."""
    # Python would print a traceback. Where Ctrl-C is ignored, as behind a shell's `&`, that stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from orbit_runtime.cli.main import main as run

    run()


def _end(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"stopped on request, before anything began\n")
    os._exit(_STOPPED)


if __name__ == "__main__":
    main()
