"""Ctrl-C from the first import of a command to its last line.

Belongs here: whose answer it is when. Does not belong here: what a run does with it (`workers.child.signals`).
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from orbit_runtime.errors import EXIT_STOPPED


def interruptible[T](command: Callable[[T], int], given: T) -> int:
    """Calls a command, within which Ctrl-C raises KeyboardInterrupt; afterwards it ends the process with its code.

    Until now it ended the process (`__main__`). Where it is ignored, or handled by somebody else, that stays so.
    """
    before = signal.getsignal(signal.SIGINT)
    is_ours = callable(before) and threading.current_thread() is threading.main_thread()
    code = EXIT_STOPPED

    def end(_number: int, _frame: FrameType | None) -> None:
        os._exit(code)

    try:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = command(given)
    except KeyboardInterrupt:
        # Before the command began, or again while the first one was being answered.
        print("stopped on request", file=sys.stderr)
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, end)
    return code


def end_stopped() -> NoReturn:
    """Ends this process with 75, as `sys.exit` does where nothing was interrupted.

    A KeyboardInterrupt that passes through code which a C library runs makes Python end itself by SIGINT, whoever
    handled it since; a shell's script then takes the command for one that was killed.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(EXIT_STOPPED)
