"""A store over a real obstore store that fails when told to, and a clock that only moves when slept on.

Belongs here: the faults that no real store produces on demand: 503, an answer that is lost after the deed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from orbit_runtime.storage import Store

SLOW_DOWN = (
    "Generic S3 error: Server returned non-2xx status code: 503: <Error><Code>SlowDown</Code></Error> secret=hunter2"
)


class FakeClock:
    """Wall clock, monotonic clock and sleep in one."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class FaultyBackend:
    """Passes calls on to `inner`. `plan` holds, per call name, what the next calls do before or after they are done."""

    def __init__(self, inner: Any = None) -> None:
        self.inner = inner if inner is not None else MemoryStore()
        self.calls: list[tuple[str, str]] = []
        self.before: dict[str, list[Exception | None]] = {}
        self.after: dict[str, list[Exception | None]] = {}
        self.hooks: dict[str, Callable[[str], None]] = {}
        """Called with the key before the deed: where a test lets another writer act, or dies."""

    def fail(self, call: str, times: int, *, lost_reply: bool = False, text: str = SLOW_DOWN) -> None:
        """The next `times` calls fail; with `lost_reply` after they were carried out."""
        (self.after if lost_reply else self.before).setdefault(call, []).extend([GenericError(text)] * times)

    def put(self, path: str, file: Any, /, *, mode: Any = None, **streaming: Any) -> Any:
        return self._do("put", path, lambda: self.inner.put(path, file, mode=mode, **streaming))

    def get(self, path: str, /) -> Any:
        return self._do("get", path, lambda: self.inner.get(path))

    def get_range(self, path: str, /, *, start: int, end: int) -> Any:
        return self._do("get_range", path, lambda: self.inner.get_range(path, start=start, end=end))

    def head(self, path: str, /) -> Any:
        return self._do("head", path, lambda: self.inner.head(path))

    def list(self, prefix: str | None = None) -> Any:
        return self._do("list", prefix or "", lambda: self.inner.list(prefix))

    def list_with_delimiter(self, prefix: str | None = None) -> Any:
        return self._do("list", prefix or "", lambda: self.inner.list_with_delimiter(prefix))

    def delete(self, paths: Any, /) -> Any:
        return self._do("delete", ",".join(paths), lambda: self.inner.delete(paths))

    def _do(self, call: str, path: str, deed: Callable[[], Any]) -> Any:
        self.calls.append((call, path))
        if hook := self.hooks.get(call):
            hook(path)
        self._raise_planned(self.before, call)
        answer = deed()
        self._raise_planned(self.after, call)
        return answer

    @staticmethod
    def _raise_planned(plan: dict[str, list[Exception | None]], call: str) -> None:
        error = plan[call].pop(0) if plan.get(call) else None
        if error is not None:
            raise error


def faulty_store(backend: FaultyBackend, clock: FakeClock, *, deadline: float = 120.0) -> Store:
    """A remote-like store (no folder, no lock) over the backend."""
    return Store(
        backend,
        "s3://bucket/runs/x",
        root=None,
        deadline_seconds=deadline,
        clock=clock,
        sleep=clock.sleep,
        monotonic=clock,
    )
