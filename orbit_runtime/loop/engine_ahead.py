"""An engine that starts while the ranks of the trainer do: neither needs the other before the first publish.

Belongs here: when that may be, the thread, and ending what it began. Does not belong here: what an engine is built
from (`engines`), processes (`workers`).
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from threading import Thread
from typing import Any

from orbit_runtime.errors import EngineDiedError
from orbit_runtime.loop.engines import build_servers
from orbit_runtime.loop.sides import EngineOrder
from orbit_runtime.loop.trainers import Division
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.rollout.sglang_server import check_served
from orbit_runtime.spec import Resolved


def may_start_ahead(resolved: Resolved, division: Division) -> bool:
    """Whether servers may start beside ranks. On GPUs that both share they may not: a server counts what memory is
    free before and after it has loaded, and would take what the trainer loads meanwhile for its own."""
    if division.trainer != "Megatron" or resolved.engine != "SGLang":
        return False
    return resolved.device == "cpu" or resolved.run.spec.placement.layout == "Split"


class EngineAhead:
    """Starts servers in a thread, from what the checkpoint's headers tell of the model."""

    def __init__(self, order: EngineOrder) -> None:
        """
        Raises:
            UnsupportedError: (78) servers cannot apply this adapter.
        """
        facts = order.facts
        check_served(facts.adapter, facts.layers, facts.modules)
        self._closing = _Closing()
        self._order = replace(order, closing=self._closing)
        self._engine: Future[ServedEngine] = Future()
        # As a daemon it delays no exit of the process: an orderly one has called `close`.
        self._thread = Thread(target=self._start, name="engine-ahead", daemon=True)
        self._thread.start()

    def _start(self) -> None:
        try:
            self._engine.set_result(build_servers(self._order))
        except BaseException as error:
            self._engine.set_exception(error)

    def check(self) -> None:
        """Raises what ended the start of the servers, if it has failed by now."""
        if self._engine.done():
            self._engine.result()

    def take(self) -> ServedEngine:
        """The engine, once its servers respond; the caller closes it. Raises: as of `engines.build_servers`."""
        return self._engine.result()

    def close(self) -> None:
        """Ends the servers, also those that still start. Safe to call twice."""
        self._closing.close()
        self._thread.join()
        # An engine that nobody took still has a client.
        if self._engine.exception() is None:
            self._engine.result().close()


class _Closing(ExitStack):
    """May be closed by one thread while another pushes on it: what comes too late is closed at once."""

    def __init__(self) -> None:
        super().__init__()
        self._is_over = False

    def close(self) -> None:
        self._is_over = True
        super().close()

    def enter_context[T](self, cm: AbstractContextManager[T, bool | None]) -> T:
        entered = super().enter_context(cm)
        self._check()
        return entered

    def callback(self, *arguments: Any, **named: Any) -> Any:
        pushed = super().callback(*arguments, **named)
        self._check()
        return pushed

    def _check(self) -> None:
        if self._is_over:
            super().close()
            raise EngineDiedError("the engine is not needed any more")
