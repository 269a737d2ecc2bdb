"""Facts about a run: the data classes that observing produces and planning reads.

Belongs here: frozen data, and questions that one object can answer about itself.
Does not belong here: reading the cluster (`observe`), or deciding anything (`plan`, `policies`).
Times are seconds since the epoch, as the cluster's clocks wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Budget = Literal["free", "infra", "user"]
Owner = Literal["none", "user", "cluster", "hardware", "orbit"]
Result = Literal["Succeeded", "Stopped", "Failed"]
RUN_CONTAINER, ENGINE_CONTAINER, RANKS_CONTAINER = "run", "engine", "ranks"


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an attempt ended, which budget it is charged to, and who must act."""

    result: Result
    reason: str
    """CamelCase, one of a closed set (`policies.failure`)."""
    budget: Budget = "free"
    owner: Owner = "none"
    message: str = ""
    exit_code: int | None = None
    avoid_node: bool = False
    """The next attempt must not land on the same node."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """The life of one Job. `verdict` is None while the attempt lasts, and final afterwards."""

    number: int
    job_uid: str = ""
    """Empty until the Job has been seen."""
    pod_uid: str = ""
    pod: str = ""
    node: str = ""
    created: float | None = None
    scheduled: float | None = None
    """When its pod was placed on a node, and so took its GPUs."""
    started: float | None = None
    """When its container started."""
    answered: float | None = None
    """When its pod first answered a poll."""
    running: float | None = None
    """When it began to train, with the model loaded and the engines warm."""
    ended: float | None = None
    step: int = 0
    checkpoint_step: int | None = None
    checkpoint_at: float | None = None
    """When its newest durable checkpoint was first seen."""
    earlier_seconds: float = 0.0
    """Seconds for which earlier pods of this Job held the GPUs (a queue evicted the Job and admitted it again)."""
    verdict: Verdict | None = None

    @property
    def is_over(self) -> bool:
        return self.verdict is not None


@dataclass(frozen=True, slots=True)
class ContainerEnd:
    """The terminated state of the container of Orbit."""

    exit_code: int
    reason: str = ""
    """The kubelet's reason, such as `OOMKilled`."""
    message: str = ""
    """The termination message."""
    finished: float | None = None


@dataclass(frozen=True, slots=True)
class PodFacts:
    """One pod of a run."""

    name: str
    uid: str
    attempt: int
    job_uid: str = ""
    """Uid of the Job or RayCluster that created it."""
    phase: str = "Pending"
    node: str = ""
    ip: str = ""
    created: float = 0.0
    deletion_due: float | None = None
    """When its grace period ends; set once it is being deleted."""
    scheduled: float | None = None
    unschedulable: str = ""
    """The scheduler's message while no node fits."""
    started: float | None = None
    end: ContainerEnd | None = None
    engine_killed: bool = False
    """Whether the engine container of a `Split` pod was ever killed for its memory."""
    waiting_reason: str = ""
    """Why a container does not start, such as `ImagePullBackOff`."""
    waiting_message: str = ""
    waiting_container: str = ""
    """Name of the container that does not start."""
    side_failure: str = ""
    """How a container beside the run's own failed, such as one that a webhook injected."""
    still_running: tuple[str, ...] = ()
    """Names of the other containers that run now."""
    gates: tuple[str, ...] = ()
    """Names of the scheduling gates that hold it."""
    is_ready: bool = False
    disruption: str = ""
    """Reason of the `DisruptionTarget` condition, such as `PreemptionByScheduler`."""
    reason: str = ""
    """The kubelet's or a controller's reason for the whole pod, such as `Evicted`."""
    message: str = ""

    @property
    def is_terminal(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def outlived_since(self) -> float | None:
        """When its run's container ended, while another container keeps the pod running; otherwise None."""
        return None if self.is_terminal or self.end is None else self.end.finished

    @property
    def is_deleting(self) -> bool:
        return self.deletion_due is not None


@dataclass(frozen=True, slots=True)
class JobFacts:
    """One child Job."""

    name: str
    uid: str
    attempt: int
    created: float = 0.0
    finished: Literal["Complete", "Failed"] | None = None
    finished_at: float | None = None
    failure: str = ""
    """Reason of its `Failed` condition."""
    exit_code: int | None = None
    """The container's exit code according to the `Failed` condition, which outlives the pod."""
    is_suspended: bool = False
    is_deleting: bool = False
    had_pod: bool = False
    """Whether its controller has counted a pod, which may be gone by now."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node, or its absence."""

    name: str
    exists: bool = True
    is_ready: bool = True
    not_ready_since: float | None = None
    problems: tuple[str, ...] = ()
    """Reasons of conditions that report broken GPUs, as the node's health agent wrote them."""


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """What Kueue reports about the current Job's Workload."""

    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """What the pod reported about itself at time `at`; every other field may be missing."""

    at: float
    pod_uid: str
    phase: str = ""
    step: int = 0
    total: int | None = None
    reward: float | None = None
    parity: float | None = None
    parity_limit: float | None = None
    policy_version: int | None = None
    adapter_digest: str | None = None
    checkpoint: str | None = None
    checkpoint_step: int | None = None
    best_step: int | None = None
    best_value: float | None = None
    best_evaluation: str | None = None
    tokens_per_second: float | None = None
    eta_seconds: float | None = None
    resumed_from: int | None = None
    """Step of the checkpoint from which it resumed; 0 if it found none."""
    execution: int | None = None
    is_live: bool = True
    message: str = ""


@dataclass(frozen=True, slots=True)
class Condition:
    """A `metav1.Condition`. `since` is the time of its last transition."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""
    since: float = 0.0
    generation: int = 0


@dataclass(frozen=True, slots=True)
class RecordedStatus:
    """The contents of the run's `status`.

    It is the only source for attempts whose Job or pod is gone, for the end of a run, and for the time since which a
    condition holds. If the status is lost, everything that the Jobs show is still right.
    """

    attempts: tuple[Attempt, ...] = ()
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    retired: Mapping[str, float] = field(default_factory=dict)
    """Sums over attempts that are no longer listed."""
    finished_at: float | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)

    def holds(self, kind: str) -> bool:
        condition = self.conditions.get(kind)
        return condition is not None and condition.status == "True"


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """`spec.lifecycle`, as planning reads it."""

    suspend: bool = False
    queue_name: str | None = None
    managed_by: str | None = None
    ttl_seconds: int | None = None
    active_deadline_seconds: int | None = None
    startup_deadline_seconds: int | None = None
    waiting_deadline_seconds: int | None = None
    max_user_retries: int = 0
    max_infra_restarts: int = 10


@dataclass(frozen=True, slots=True)
class RanksFacts:
    """One RayCluster of a run over several nodes."""

    name: str
    uid: str
    attempt: int
    is_deleting: bool = False
    problem: str = ""
    """Why KubeRay cannot create its pods, in the API server's words."""
    is_suspended: bool = False
    """Whether a queue holds it, or has taken it back: it has no pods then."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One OrbitRun."""

    namespace: str
    name: str
    uid: str
    generation: int = 1
    created: float = 0.0
    deleting_since: float | None = None
    finalizers: tuple[str, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    gpus: int = 8
    """GPUs of all its nodes together."""
    nodes: int = 1
    total_steps: int | None = None
    checkpoint_every: int = 1
    deletes_artifacts: bool = False
    artifacts: str = ""
    """Location of its artifacts."""
    metrics_port: int | None = 9400
    """Port at which its pods are polled; `None` if they open none."""
    invalid: str = ""
    """Fields of the manifest that this operator cannot read; empty if it can read everything."""
    plan: tuple[str, str, str] = ("Unknown", "PlannerUnavailable", "")
    """The planner's verdict on the manifest: status, reason and message of `PlanAccepted`."""

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything about a run except its manifest, at one moment."""

    stored: RecordedStatus = field(default_factory=RecordedStatus)
    jobs: tuple[JobFacts, ...] = ()
    pods: tuple[PodFacts, ...] = ()
    nodes: Mapping[str, NodeFacts] = field(default_factory=dict)
    progress: Progress | None = None
    queue: QueueFacts | None = None
    warning: str = ""
    """Why the pod or its container is not created, in the words of a warning event."""
    is_new: bool = False
    """Whether this process, whose first lists were complete, has never seen a Job or pod of this run."""
    former_pods: int = 0
    """Live pods of an earlier run of the same name, which is being deleted."""
    ranks: tuple[RanksFacts, ...] = ()
    """RayClusters; read only if the run has several nodes."""
    rank_pods: tuple[PodFacts, ...] = ()
    """Pods of the RayClusters."""
    ranks_problem: str = ""
    """Why there can be no RayCluster; empty if there can."""
    cleanup: Literal["", "Running", "Complete", "Failed"] = ""
    """State of the Job that deletes the artifacts."""
    cleanup_failure: str = ""
    """Why that Job failed, or what it waits for: of its newest pod, or its controller's reason."""
