"""Rewards that are callables of this process, given from Python: `loop.run(spec, rewards=...)`.

Belongs here: running them off the loop's thread and noticing the ones that overstay.
Does not belong here: rewards by dotted path, which get processes of their own (`reward_pool`).

A thread cannot be ended from outside. A call that overstays is counted as `timeout` and left behind; its thread ends
when the function returns, or with the process. Whoever needs a limit that really ends a call names the
reward by its path.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from orbit_runtime.errors import ManifestError
from orbit_runtime.workers.reward_function import TargetError, call_reward, check_callable
from orbit_runtime.workers.reward_protocol import (
    MAX_FAILURES_KEPT,
    RewardCall,
    RewardFailure,
    RewardResult,
    RewardTarget,
    build_failure,
)


class RewardThreads:
    """One call at a time, in order, in a thread of its own.

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
        self._calls: list[RewardCall] = []
        self._results: list[RewardResult] = []
        self._failures: list[RewardFailure] = []

    @property
    def failures(self) -> Sequence[RewardFailure]:
        return tuple(self._failures)

    def submit(self, calls: Sequence[RewardCall]) -> None:
        self._calls.extend(calls)

    def wait(self, seconds: float) -> bool:
        """Scores until the time is over, and then finishes the call that is running."""
        deadline = time.monotonic() + seconds
        while len(self._results) < len(self._calls):
            if time.monotonic() >= deadline:
                return False
            self._results.append(self._run(self._calls[len(self._results)]))
        return True

    def gather(self) -> list[RewardResult]:
        self.wait(math.inf)
        results = self._results
        self._calls, self._results = [], []
        return results

    def score(self, calls: Sequence[RewardCall]) -> list[RewardResult]:
        self.submit(calls)
        return self.gather()

    def close(self) -> None:
        self._calls, self._results = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, call: RewardCall) -> RewardResult:
        target = self._targets[call.reward]
        assert callable(target.target)
        function = target.target
        answer: queue.SimpleQueue[RewardResult] = queue.SimpleQueue()

        def work() -> None:
            answer.put(call_reward(function, target.arguments, call.completion, call.prompt, call.fields))

        threading.Thread(target=work, name=f"reward-{target.name}", daemon=True).start()
        try:
            result = answer.get(timeout=target.timeout_seconds)
        except queue.Empty:
            reason = f"no answer within {target.timeout_seconds:g} s"
            result = RewardResult("timeout", None, reason, target.timeout_seconds)
        if result.outcome in ("timeout", "crash") and len(self._failures) < MAX_FAILURES_KEPT:
            self._failures.append(build_failure(call, result))
        return result
