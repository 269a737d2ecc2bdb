"""The end of a run whose device never finishes: the thread that waits for it cannot be ended, so the process is.

Belongs here: what is told and kept before. Does not belong here: noticing it (`workers.stalls`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from orbit_runtime.errors import StalledError
from orbit_runtime.loop.keep import keep_failure, stacks_name
from orbit_runtime.loop.show import Show
from orbit_runtime.loop.telling import tell_the_end
from orbit_runtime.observability.last_words import add_last_words, words_of
from orbit_runtime.observability.notify import Webhook
from orbit_runtime.storage import Execution, Store
from orbit_runtime.workers.stalls import Stall, owns_process


def end_stalled(store: Store, execution: Execution, show: Show, webhooks: list[Webhook]) -> Callable[[Stall], None]:
    """What to do once a `Stall` is found: the run folder gets the stacks, and a process that belongs to the run ends
    with 83. In any other, such as a notebook's, the user is told and decides."""

    def ended(stall: Stall) -> None:
        step = show.step_now or 0
        error = StalledError(
            f"{stall.what} did not end within {stall.seconds:.0f} s (stage {show.current}, step {step}): the device "
            f"does not answer; what every thread was doing is in {stacks_name(step)}",
            where=store.uri,
            fix="see the driver's log (`dmesg`, Xid errors); the same command goes on from the newest checkpoint",
        )
        # Whatever fails here, the process ends: its GPU is of no use to anybody until it does.
        with suppress(Exception):
            keep_failure(store, step, error, None, stacks=stall.stacks)
        if not owns_process():
            show.note(f"warning: {error}")
            return
        with suppress(Exception):
            show.status.update(phase="Failed", message=str(error), exit_code=error.exit_code)
            add_last_words({**show.status.snapshot(), **words_of(error)})
            tell_the_end(webhooks, show, store.uri, StalledError)
        with suppress(Exception):
            show.progress.close()
        with suppress(Exception):
            print(f"error: {error}", file=sys.stderr, flush=True)
        with suppress(Exception):
            execution.release(StalledError.__name__)
        os._exit(error.exit_code)

    return ended
