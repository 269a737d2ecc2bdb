"""The state of a run: the facts behind `/status`, `/healthz` and `/readyz`.

Belongs here: the facts, kept consistent between threads, and whether the run is alive and ready.
Does not belong here: HTTP (`server`), or acting on these facts (`loop`, the operator).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from orbit_runtime.observability.metrics import MetricsRow
from orbit_runtime.workers.child.heartbeat import STALL_SECONDS

Phase = Literal["Starting", "Preflight", "Running", "Stopping", "Done", "Stopped", "Failed"]
_ENDED: frozenset[str] = frozenset({"Done", "Stopped", "Failed"})

_STALL_STEPS = 10.0
"""A run is stalled if nothing happened for this many times its own step, and never before the limit."""


@dataclass(frozen=True, slots=True)
class StatusFacts:
    """The same facts as `status` of the OrbitRun object."""

    run: str
    namespace: str = ""
    attempt: int = 1
    execution: int | None = None
    phase: Phase = "Starting"
    """Only for display."""
    stage: str | None = None
    """The current stage of the step, such as `collect`."""
    step: int = 0
    total: int | None = None
    reward: float | None = None
    parity: float | None = None
    parity_limit: float | None = None
    policy_version: int | None = None
    adapter_digest: str | None = None
    last_checkpoint: str | None = None
    """Prefix of the newest durable checkpoint."""
    last_checkpoint_step: int | None = None
    best: Mapping[str, Any] | None = None
    """The best of the evaluated adapters: `step`, `evaluation` and its `value`."""
    tokens_per_second: float | None = None
    eta_seconds: float | None = None
    resumed_from_step: int | None = None
    """Step of the checkpoint from which this process resumed; 0 if it found none."""
    message: str | None = None
    exit_code: int | None = None


class LiveStatus:
    """Thread-safe. The loop writes with `update`, `observe` and `beat`; the server reads with `snapshot`."""

    def __init__(
        self,
        run: str,
        *,
        namespace: str = "",
        attempt: int = 1,
        total: int | None = None,
        stall_limit_seconds: float = STALL_SECONDS,
        clock: Callable[[], float] = time.time,
        silent_seconds: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """
        Args:
            clock: seconds since the epoch.
            silent_seconds: seconds since the newest sign of life of the current stage. A first step with long answers
                may take hours.
        """
        self._lock = threading.Lock()
        self._clock = clock
        self._silent_seconds = silent_seconds
        self._stall_limit = stall_limit_seconds
        self._facts = StatusFacts(run=run, namespace=namespace, attempt=attempt, total=total)
        self._step_seconds: float | None = None
        self._started = self._progressed = clock()

    @property
    def facts(self) -> StatusFacts:
        with self._lock:
            return self._facts

    def update(self, **changes: Any) -> None:
        """Sets facts by name, which counts as progress. An unknown name is a TypeError."""
        with self._lock:
            self._facts = replace(self._facts, **changes)
            self._progressed = self._clock()

    def beat(self) -> None:
        """Records that something happened, such as a finished completion: the run is not stalled."""
        with self._lock:
            self._progressed = self._clock()

    def observe(self, row: MetricsRow) -> None:
        """Takes the facts of a finished step, and estimates the time left from the steps so far."""
        seconds = row.number("seconds_total")
        if seconds is not None:
            earlier = self._step_seconds
            self._step_seconds = seconds if earlier is None else 0.8 * earlier + 0.2 * seconds
        step = int(row.number("step") or 0)
        total = self.facts.total
        left = None if total is None or self._step_seconds is None else max(0, total - step) * self._step_seconds
        version = row.number("policy_version")
        digest = row["adapter_digest"]
        self.update(
            step=step,
            reward=row.number("reward_mean"),
            parity=row.number("parity_mean"),
            parity_limit=row.number("parity_limit"),
            policy_version=None if version is None else int(version),
            adapter_digest=None if digest is None else str(digest),
            tokens_per_second=row.number("tokens_per_second"),
            eta_seconds=left,
        )

    def snapshot(self) -> dict[str, Any]:
        """The facts as JSON values, with liveness, readiness and the ages on which they depend."""
        live, live_reason = self.is_live()
        ready, ready_reason = self.is_ready()
        with self._lock:
            now = self._clock()
            return {
                **_json_values(asdict(self._facts)),
                "started_at": self._started,
                "seconds_running": now - self._started,
                "seconds_since_progress": self._idle(),
                "live": live,
                "ready": ready,
                "reason": live_reason or ready_reason,
            }

    def newest_sign(self) -> float:
        """Time of the newest activity, in seconds since the epoch: what `/healthz` judges by."""
        with self._lock:
            return self._clock() - self._idle()

    def is_live(self) -> tuple[bool, str | None]:
        """False if a run that has not ended made no progress within its stall limit."""
        with self._lock:
            if self._facts.phase in _ENDED:
                return True, None
            limit = max(self._stall_limit, _STALL_STEPS * (self._step_seconds or 0.0))
            idle = self._idle()
            if idle <= limit:
                return True, None
            return False, f"no progress for {idle:.0f} s (limit {limit:.0f} s), stage {self._facts.stage or 'unknown'}"

    def _idle(self) -> float:
        """Call with the lock."""
        return min(self._clock() - self._progressed, self._silent_seconds())

    def is_ready(self) -> tuple[bool, str | None]:
        """True from the first sampled step until the run ends."""
        phase = self.facts.phase
        return (True, None) if phase == "Running" else (False, f"phase is {phase}")


def _json_values(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in facts.items()
    }
