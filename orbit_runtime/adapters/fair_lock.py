"""Access in turn to a model that two threads share."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """A reentrant lock that is granted in the order of requests.

    With `threading.RLock`, a thread that releases the lock and takes it again at once overtakes all waiting threads: a
    decode loop would block the trainer for as long as there is something to sample.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._asked: deque[object] = deque()
        self._holder: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._holder == me:
            self._depth += 1
            return
        mine = object()
        with self._changed:
            self._asked.append(mine)
            try:
                self._changed.wait_for(lambda: self._asked[0] is mine)
            except BaseException:
                # Ctrl-C while waiting: the others must not wait for this thread.
                self._asked.remove(mine)
                self._changed.notify_all()
                raise
            self._holder, self._depth = me, 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        with self._changed:
            self._holder = None
            self._asked.popleft()
            self._changed.notify_all()
