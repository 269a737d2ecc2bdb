"""`status` of an OrbitRun: the operator's observations of a run.

Belongs here: the facts, their kinds and bounds; the CRD's status schema comes from here. Does not belong here: finding
the facts out (the operator), or the pod's own `/status` (`observability`).

Every field may be unset: a status says what was observed and nothing else. `phase` is for display; a program reads the
conditions.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from orbit_runtime.spec.block import LABEL_KEY, MAX_LABEL_KEY, AsTuple, Block

Phase = Literal[
    "Pending", "Queued", "Starting", "Running", "Stopping",
    "Restarting", "Suspending", "Suspended", "Succeeded", "Failed",
]  # fmt: skip
WhoActs = Literal["None", "User", "Cluster", "Hardware", "Orbit"]

MAX_ATTEMPTS = 10
"""Attempts that are listed; `retired` holds the sums of older ones."""
MAX_CONDITIONS = 32
MAX_COUNT = 2**53

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
LARGEST_NUMBER = 1e18
"""The API server compares a whole number such as 1.0 as int64, in which a larger bound turns negative."""
Number = Annotated[float, Field(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)]
Time = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
Reason = Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
Message = Annotated[str, Field(max_length=4096)]
Name = Annotated[str, Field(max_length=253)]
ExitCode = Annotated[int, Field(ge=0, le=255)]


class ParityStatus(Block):
    """How far trainer and engine differ."""

    value: Number | None = None
    """Mean |Δ log-prob| of the newest step."""
    limit: Number | None = None
    """Limit above which the run stops."""


class CheckpointStatus(Block):
    """A durable checkpoint."""

    step: Count | None = None
    """Step after which it was written."""
    uri: Annotated[str, Field(max_length=2048)] | None = None
    """Where it is."""
    time: Time | None = None
    """When it was first seen."""


class BestStatus(Block):
    """The best of the run's adapters by its own evaluations."""

    step: Count | None = None
    """Step after which it was published; `RUN@best` names it."""
    evaluation: Annotated[str, Field(max_length=63)] | None = None
    """Evaluation that decides."""
    value: Number | None = None
    """What that evaluation found."""


class GPUSeconds(Block):
    """GPUs multiplied by seconds, over all attempts."""

    useful: Count | None = None
    """Spent on steps that a durable checkpoint holds, or that one may still cover."""
    lost: Count | None = None
    """Spent on steps that were lost with their attempt."""
    waiting: Count | None = None
    """GPUs taken but not training: images, model, warm-up."""


class EndingStatus(Block):
    """How an attempt ended."""

    time: Time | None = None
    """When its pod ended."""
    result: Literal["Succeeded", "Stopped", "Failed"]
    """Succeeded, stopped on request at a checkpoint, or failed."""
    reason: Reason | None = None
    """Reason in one word."""
    message: Message | None = None
    """Reason in a sentence."""
    who_acts: WhoActs | None = None
    """Who must act so that it does not happen again."""
    budget: Literal["Free", "Infra", "User"] | None = None
    """Budget from which a new attempt is paid."""
    exit_code: ExitCode | None = None
    """Exit code of the run's container."""
    avoid_node: bool | None = None
    """Whether the next attempt avoids this node."""


class AttemptStatus(Block):
    """One attempt: the lifetime of one Job."""

    number: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    """Number of the attempt, from 1, always increasing."""
    job_uid: Annotated[Name | None, Field(alias="jobUID")] = None
    """UID of its Job."""
    pod: Name | None = None
    """Its newest pod."""
    pod_uid: Annotated[Name | None, Field(alias="podUID")] = None
    """UID of that pod."""
    node: Name | None = None
    """Node of that pod."""
    create_time: Time | None = None
    """When its Job was created."""
    schedule_time: Time | None = None
    """When its GPUs were taken."""
    start_time: Time | None = None
    """When its container started."""
    answer_time: Time | None = None
    """When it first reported its state."""
    run_time: Time | None = None
    """When it started training."""
    step: Count | None = None
    """Last step that it finished."""
    checkpoint: CheckpointStatus | None = None
    """Its newest checkpoint."""
    earlier_seconds: Count | None = None
    """GPU-seconds of the pods that its Job had before the newest one."""
    ending: EndingStatus | None = None
    """How it ended; unset while it is active."""


class Condition(Block):
    """A `metav1.Condition`."""

    type: Annotated[str, Field(min_length=1, max_length=MAX_LABEL_KEY - 1, pattern=LABEL_KEY)]
    """What the condition is about, such as `Progressing`."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    observed_generation: Count | None = None
    """Generation of the spec for which it was decided."""
    last_transition_time: Time
    """When `status` last changed."""
    reason: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    """Reason in one word."""
    message: Annotated[str, Field(max_length=32768)]
    """Reason in a sentence."""


class RunStatus(Block):
    """The observed state of a run; the operator writes it, once per pass."""

    observed_generation: Count | None = None
    """Generation of the spec to which this status refers."""
    phase: Phase | None = None
    """State of the run in one word, for display."""
    reason: Reason | None = None
    """Reason for the phase, in one word."""
    message: Message | None = None
    """Reason for the phase, in a sentence, with what to do."""
    who_acts: WhoActs | None = None
    """Who must act for the run to continue."""
    step: Count | None = None
    """Last finished step."""
    steps: Count | None = None
    """Number of steps of the whole run."""
    reward: Number | None = None
    """Mean reward of that step."""
    parity: ParityStatus | None = None
    """How far trainer and engine differ."""
    policy_version: Count | None = None
    """Version of the adapter that is sampled from."""
    adapter_digest: Annotated[str, Field(max_length=128)] | None = None
    """Digest of that adapter."""
    checkpoint: CheckpointStatus | None = None
    """The newest checkpoint, from which a new attempt continues."""
    best: BestStatus | None = None
    """The best of its adapters; unset if none was evaluated."""
    tokens_per_second: Number | None = None
    """Throughput of the last step."""
    seconds_left: Count | None = None
    """Estimated time to the last step."""
    execution: Count | None = None
    """Execution number under which the run folder is written; older writers are refused."""
    last_report_time: Time | None = None
    """When the pod last reported something new; all of the above from `step` on dates from then."""
    attempt: Count | None = None
    """Number of the newest attempt."""
    node: Name | None = None
    """Node of the newest attempt."""
    attempts: Annotated[tuple[AttemptStatus, ...], AsTuple, Field(max_length=MAX_ATTEMPTS)] | None = None
    """The newest attempts, oldest first."""
    retired: Annotated[dict[str, Annotated[int, Field(ge=0, le=MAX_COUNT)]], Field(max_length=32)] | None = None
    """Sums over older attempts, which are no longer listed."""
    user_retries: Count | None = None
    """New attempts paid from `lifecycle.maxUserRetries`."""
    infra_restarts: Count | None = None
    """New attempts paid from `lifecycle.maxInfraRestarts`."""
    free_restarts: Count | None = None
    """New attempts that cost neither budget: suspension, preemption, a stop on request."""
    next_attempt_time: Time | None = None
    """When the next attempt starts, during its back-off."""
    start_time: Time | None = None
    """When the run first had its GPUs."""
    completion_time: Time | None = None
    """When it ended for good."""
    active_seconds: Count | None = None
    """Time that the run's pods have taken, which `lifecycle.activeDeadlineSeconds` limits."""
    gpu_seconds: GPUSeconds | None = None
    """GPU-seconds that the run has taken."""
    conditions: Annotated[tuple[Condition, ...], AsTuple, Field(max_length=MAX_CONDITIONS)] | None = None
    """Conditions of the run, for programs."""
