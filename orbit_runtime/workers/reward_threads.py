"""Rewards that are callables of this process, passed from Python: `run(…, rewards=…)`.

Belongs here: running them off the loop's thread and noticing the ones that exceed their time. Does not belong here:
rewards by dotted path, which get processes of their own (`reward_pool`).

A thread cannot be ended from outside. A call that exceeds its time counts as `timeout` and is left behind; its thread
ends when the function returns, or with the process. For a limit that really ends a call, name the reward by its path.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Self

from orbit_runtime.errors import ManifestError
from orbit_runtime.workers.entrypoints import TargetError
from orbit_runtime.workers.reward_function import call_reward, check_callable
from orbit_runtime.workers.reward_protocol import (
    MAX_FAILURES_KEPT,
    RewardCall,
    RewardFailure,
    RewardResult,
    RewardTarget,
    build_failure,
)
from orbit_runtime.workers.stacks import thread_stack


class RewardThreads:
    """Runs one call at a time, in order, each in a thread of its own.

    Raises:
        ManifestError: a target is a dotted path, or cannot be called as a reward is.
    """

    def __init__(self, targets: Sequence[RewardTarget]) -> None:
        for target in targets:
            if isinstance(target.target, str):
                raise ManifestError(
                    f"reward {target.name!r} is a dotted path, but others of this run were given from Python",
                    where="spec.environment.rewards",
                    fix="give every reward from Python, or none",
                )
            try:
                check_callable(target.target, target.name, target.arguments)
            except TargetError as error:
                raise ManifestError(str(error), where=f"spec.environment.rewards[{target.name!r}]") from error
        self._targets = {target.name: target for target in targets}
        self._queue: queue.SimpleQueue[tuple[Sequence[RewardCall], Future[list[RewardResult]]] | None] = (
            queue.SimpleQueue()
        )
        self._is_closing = False
        self._failures: list[RewardFailure] = []
        # A daemon thread, because a call that hangs must not keep the process alive.
        threading.Thread(target=self._serve, name="reward-threads", daemon=True).start()

    @property
    def failures(self) -> Sequence[RewardFailure]:
        return tuple(self._failures)

    def submit(self, calls: Sequence[RewardCall]) -> Future[list[RewardResult]]:
        future: Future[list[RewardResult]] = Future()
        future.set_running_or_notify_cancel()
        self._queue.put((tuple(calls), future))
        return future

    def score(self, calls: Sequence[RewardCall]) -> list[RewardResult]:
        return self.submit(calls).result()

    def close(self) -> None:
        self._is_closing = True
        self._queue.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        while (submitted := self._queue.get()) is not None:
            calls, future = submitted
            results = []
            for call in calls:
                if self._is_closing:
                    break
                results.append(self._run(call))
            if len(results) == len(calls):
                future.set_result(results)
            else:
                future.set_exception(CancelledError())

    def _run(self, call: RewardCall) -> RewardResult:
        target = self._targets[call.reward]
        assert callable(target.target)
        function = target.target
        answer: queue.SimpleQueue[RewardResult] = queue.SimpleQueue()

        # Copied, so that a call's changes are invisible to other calls, as in processes.
        prompt, fields = copy.deepcopy(call.prompt), copy.deepcopy(dict(call.fields))

        def work() -> None:
            answer.put(call_reward(function, target.arguments, call.completion, prompt, fields))

        thread = threading.Thread(target=work, name=f"reward-{target.name}", daemon=True)
        thread.start()
        try:
            result = answer.get(timeout=target.timeout_seconds)
        except queue.Empty:
            reason = f"no answer within {target.timeout_seconds:g} s"
            result = RewardResult("timeout", None, reason, target.timeout_seconds, thread_stack(thread))
        if result.outcome in ("timeout", "crash") and len(self._failures) < MAX_FAILURES_KEPT:
            self._failures.append(build_failure(call, result))
        return result
