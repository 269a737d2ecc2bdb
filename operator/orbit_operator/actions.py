"""What a plan consists of: actions, events, and the state that the status is built from."""

from __future__ import annotations

from dataclasses import dataclass, field

from orbit_operator.facts import Attempt, Owner
from orbit_operator.policies.accounting import GPUSeconds
from orbit_operator.policies.restart import BudgetUse


@dataclass(frozen=True, slots=True)
class CreateAttempt:
    """Create Job `<run>-a<number>`, after everything that its pod needs."""

    number: int
    avoid_nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ApplySupport:
    """Create the ConfigMap and the NetworkPolicy again: the pod waits for one that is missing."""


@dataclass(frozen=True, slots=True)
class CreateRanks:
    """Create the RayCluster of an attempt: before its Job, and again if it is gone while the Job lives."""

    attempt: int


@dataclass(frozen=True, slots=True)
class DeleteRanks:
    """Delete a RayCluster and its pods, whose GPUs are no longer used."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete a pod: it gets SIGTERM and its grace period, and its Job ends with it."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete a Job and what is left of its pods."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class SetFinalizer:
    """Add our finalizer to the run, or remove it."""

    present: bool


@dataclass(frozen=True, slots=True)
class StartCleanup:
    """Create the Job that deletes the artifacts."""


@dataclass(frozen=True, slots=True)
class DeleteRun:
    """Delete the run: its time to live has passed."""


Action = (
    CreateAttempt
    | ApplySupport
    | CreateRanks
    | DeleteRanks
    | DeletePod
    | DeleteJob
    | SetFinalizer
    | StartCleanup
    | DeleteRun
)


@dataclass(frozen=True, slots=True)
class RunEvent:
    """One event, as `kubectl describe` shows it."""

    reason: str
    message: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """The contents of the status, before `status` turns them into API fields."""

    phase: str
    """Only for display."""
    reason: str
    message: str = ""
    owner: Owner = "none"
    """Who must act."""
    outcome: bool | None = None
    """True: complete. False: permanently failed. None: neither so far."""
    attempts: tuple[Attempt, ...] = ()
    retired: tuple[tuple[str, float], ...] = ()
    spent: BudgetUse = field(default_factory=BudgetUse)
    seconds: GPUSeconds = field(default_factory=GPUSeconds)
    next_at: float | None = None
    """When the next attempt starts, if back-off delays it."""
    plan: tuple[str, str, str] = ("Unknown", "PlannerUnavailable", "")
    """Status, reason and message of `PlanAccepted`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Actions in order, then events, then the status, written once. `wake_at`: when the plan changes by time alone."""

    actions: tuple[Action, ...] = ()
    state: State | None = None
    events: tuple[RunEvent, ...] = ()
    wake_at: float | None = None
    waits_for_ranks: int = 0
    """Number of the attempt that is created once the pods of its ranks are placed; 0 if none waits for that."""
