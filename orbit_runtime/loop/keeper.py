"""Makes results durable while the next step runs.

Belongs here: the thread, and the order of its work. Does not belong here: what is written (`keep`, `publish`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

_log = logging.getLogger("orbit.loop")


class Keeper:
    """One thread that runs the work it is given in order, while the loop goes on.

    Consumes: the adapter of a publish, then the checkpoint of its step. Waits for: nothing but the store. Unblocks: the
    loop, which waits for it before it publishes again, and the trainer, which does not change state that is still being
    read. Produces: bundles. A step is therefore durable before the step after the next begins, and the store sees the
    same objects in the same order as if the loop had written them itself.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="orbit-keeper")
        self._pending: list[Future[None]] = []
        self._has_failed = False

    def submit(self, work: Callable[[], object]) -> Future[None]:
        """Queues work of one step at a time: an adapter and a checkpoint. After a failure no more work is done."""
        assert len(self._pending) < 2, "the step before is not durable yet"
        self._pending.append(self._pool.submit(self._carry_out, work))
        return self._pending[-1]

    def wait(self) -> None:
        """Waits until everything is durable. Raises the first error, once."""
        pending, self._pending = self._pending, []
        errors = [error for each in pending if (error := each.exception())]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Finishes pending work. Safe to call twice."""
        self._pool.shutdown()
        for each in self._pending:
            if error := each.exception():
                _log.warning("results of the run's last step were not saved: %s", error)
        self._pending = []

    def _carry_out(self, work: Callable[[], object]) -> None:
        if self._has_failed:
            return
        try:
            work()
        except BaseException:
            self._has_failed = True
            raise
