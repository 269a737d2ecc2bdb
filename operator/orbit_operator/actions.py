"""What a plan is made of: actions, events, and the state that the status will put into words.

Belongs here: frozen nouns. Does not belong here: choosing them (`plan`), or carrying them out (`apply`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orbit_operator.facts import Attempt, Owner
from orbit_operator.policies.accounting import GPUSeconds
from orbit_operator.policies.restart import Spent


@dataclass(frozen=True, slots=True)
class CreateAttempt:
    """Make Job `<run>-a<number>`, and before it what its pod needs."""

    number: int
    avoid_nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ApplySupport:
    """Make the ConfigMap and the NetworkPolicy again: the pod waits for something that is not there."""


@dataclass(frozen=True, slots=True)
class CreateRanks:
    """Make the RayCluster of an attempt whose Job is there."""

    attempt: int


@dataclass(frozen=True, slots=True)
class DeleteRanks:
    """Delete a RayCluster and its pods: nobody uses their GPUs any more."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class DeletePod:
    """End a pod: SIGTERM, its grace period, and its Job ends with it."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete a Job and what is left of its pods."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class SetFinalizer:
    """Put our finalizer on the run, or take it off."""

    present: bool


@dataclass(frozen=True, slots=True)
class StartCleanup:
    """Make the Job that deletes the artifacts."""


@dataclass(frozen=True, slots=True)
class DeleteRun:
    """Its time to live is over."""


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
    """One line in `kubectl describe`."""

    reason: str
    message: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """What the status will say, before it is put into words."""

    phase: str
    """For display only."""
    reason: str
    message: str = ""
    owner: Owner = "none"
    """Who must act."""
    outcome: bool | None = None
    """True: complete. False: failed for good. None: neither yet."""
    attempts: tuple[Attempt, ...] = ()
    retired: tuple[tuple[str, float], ...] = ()
    spent: Spent = field(default_factory=Spent)
    seconds: GPUSeconds = field(default_factory=GPUSeconds)
    next_at: float | None = None
    """When the next attempt starts, while it waits for its back-off."""
    plan: tuple[str, str, str] = ("Unknown", "PlannerUnavailable", "")
    """Status, reason and message of `PlanAccepted`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Actions in order, then events, then the status, written once. `wake_at` is when time alone changes the answer."""

    actions: tuple[Action, ...] = ()
    state: State | None = None
    events: tuple[RunEvent, ...] = ()
    wake_at: float | None = None
