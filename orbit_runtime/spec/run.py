"""The whole manifest.

Belongs here: `OrbitRun`, its metadata, its small blocks (`model`, `parity`, `evaluation`, `checkpoint`, `lifecycle`,
`observability`), and rules between blocks. Does not belong here: the fields of larger blocks, reading a file (`load`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from orbit_runtime.spec.adapter import Adapter
from orbit_runtime.spec.algorithm import Algorithm, max_rounds
from orbit_runtime.spec.block import (
    DISPLAY,
    IDENTITY,
    LATER_DISPLAY,
    LAYOUT,
    MODEL_ON_HUB,
    SHOWN,
    VARIABLE_PATTERN,
    AsTuple,
    Block,
    Contradiction,
    LabelValue,
    Rule,
    Unique,
    Uri,
    WithoutEmpty,
    check_annotations,
    inner_blocks,
    label_keys_rule,
    scored_rule,
    uri_rule,
)
from orbit_runtime.spec.data import Data, Prompts
from orbit_runtime.spec.environment import Environment
from orbit_runtime.spec.placement import Placement
from orbit_runtime.spec.rollout import Rollout
from orbit_runtime.spec.storage import STORAGE_SCHEMES, Storage
from orbit_runtime.spec.training import Training

TrackerType = Literal["TensorBoard", "WandB", "MLflow"]
Event = Literal["Done", "Stopped", "Failed", "Gate"]
"""Ways in which a run ends, for notifications."""


class Tracker(Block):
    """A service or a folder that also receives every step's metrics. A tracker that fails never stops a run."""

    type: Annotated[TrackerType, DISPLAY, Field(examples=["TensorBoard"])]
    """The tracker's package is not installed with Orbit: `pip install 'orbit-rl[trackers]'`. Keys come from variables
    that the service itself reads, such as `WANDB_API_KEY`; on a cluster from a Secret in `placement.envFromSecrets`."""
    project: Annotated[str, DISPLAY, Field(min_length=1, max_length=128)] = "orbit"
    """Project in Weights & Biases, experiment in MLflow; the run in it has the manifest's name."""
    uri: Annotated[Uri | None, DISPLAY] = None
    """For TensorBoard a local folder, by default `tensorboard` in the run folder if that is local. For MLflow and
    Weights & Biases the server's address; if unset, their own variables decide."""


class Webhook(Block):
    """An address that is notified of the end of a run, by an HTTP POST in JSON."""

    url: Annotated[str | None, DISPLAY, Field(max_length=1024, pattern=r"^https?://")] = None
    """The address; alternatively, set `urlEnv`."""
    url_env: Annotated[
        str | None, DISPLAY, Field(max_length=256, pattern=VARIABLE_PATTERN, examples=["SLACK_WEBHOOK"])
    ] = None
    """Environment variable that holds the address, if that is a secret. On a cluster it comes from a Secret in
    `placement.envFromSecrets`."""
    events: Annotated[tuple[Event, ...], AsTuple, DISPLAY, Field(min_length=1, max_length=4)] = (
        "Done",
        "Failed",
        "Gate",
    )
    """`Stopped`: on request, to be continued. `Gate`: a measured limit stopped the run (exit codes 84 and 85)."""

    rules = (
        Rule(
            "url",
            "has(self.url) != has(self.urlEnv)",
            "a webhook has either an address or a variable that holds it",
            "write `url` or `urlEnv`, and not both",
        ),
        Rule(
            "url",
            "!has(self.url) || !self.url.matches('^https?://[^/?#]*@')",
            "the address holds a user or a password",
            "put the whole address into a variable, and name that in `urlEnv`",
        ),
    )


class Observability(Block):
    """Metrics and logs."""

    metrics_port: Annotated[int, DISPLAY, Field(ge=-1, le=65535)] = 0
    """Port of `/metrics`, `/status`, `/healthz` and `/readyz`: 0 takes any free port (on a cluster 9400), -1 opens
    none."""
    log_level: Annotated[Literal["Debug", "Info", "Warning", "Error"], DISPLAY] = "Info"
    """Lowest level that is logged."""
    log_format: Annotated[Literal["Auto", "Text", "JSON"], DISPLAY] = "Auto"
    """Format of progress and log: `Auto` is a live display on a terminal, JSON lines in a pod, and lines of text
    elsewhere."""
    trackers: Annotated[tuple[Tracker, ...], AsTuple, DISPLAY, Field(max_length=4)] = ()
    """Services that also receive every step's metrics."""
    notify: Annotated[tuple[Webhook, ...], AsTuple, DISPLAY, Field(max_length=8)] = ()
    """Addresses that are notified of the end of the run."""


LONGEST_SECONDS = 2**31 - 1
MANAGER_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_./]*[A-Za-z0-9])?$"


# Only the operator reads this block; `orbit run` accepts it and starts at once, so one file does for both. On a cluster
# `suspend`, `queueName` (while suspended) and `ttlSecondsAfterFinished` may change after the run was created, and
# nothing else of its spec.
class Lifecycle(Block):
    """The lifecycle of the run on a cluster; has no effect elsewhere."""

    suspend: Annotated[bool, DISPLAY] = False
    """`true` stops the run at a checkpoint and releases its GPUs; `false` continues it from there."""
    queue_name: Annotated[LabelValue | None, DISPLAY, Field(min_length=1, examples=["team-a"])] = None
    """Kueue LocalQueue that decides when the run may start; if unset, no queue."""
    managed_by: Annotated[
        str | None,
        DISPLAY,
        Field(min_length=3, max_length=63, pattern=MANAGER_PATTERN, examples=["kueue.x-k8s.io/multikueue"]),
    ] = None
    """Another controller that runs this object, such as `kueue.x-k8s.io/multikueue`; if unset, Orbit's operator."""
    ttl_seconds_after_finished: Annotated[int | None, DISPLAY, Field(ge=0, le=LONGEST_SECONDS)] = None
    """The object is deleted this long after its run ended; the content of `storage.uri` stays. If unset, never."""
    active_deadline_seconds: Annotated[int | None, DISPLAY, Field(ge=1, le=LONGEST_SECONDS)] = None
    """Total time that the run's pods may take, not counting waiting and suspension; if unset, no limit."""
    startup_deadline_seconds: Annotated[int | None, DISPLAY, Field(ge=1, le=LONGEST_SECONDS)] = None
    """Time from the placement of an attempt's pod to its first step: images, model, warm-up. If unset, no limit."""
    waiting_deadline_seconds: Annotated[int | None, DISPLAY, Field(ge=1, le=LONGEST_SECONDS)] = None
    """How long an attempt may wait for nodes, a quota or a queue; then the run fails. If unset, no limit."""
    termination_grace_period_seconds: Annotated[int, DISPLAY, Field(ge=1, le=86_400)] = 300
    """Time for a last checkpoint before the pod is killed."""
    max_user_retries: Annotated[int, DISPLAY, Field(ge=0, le=100)] = 0
    """New attempts after failures that the manifest or the user's code caused."""
    max_infra_restarts: Annotated[int, DISPLAY, Field(ge=0, le=1000)] = 10
    """New attempts after failures of node, GPU, network or store."""


API_VERSION = "orbitrl.dev/v1alpha1"
COLLECTING = {"contradictions": "collect"}
"""Validation context of a caller that looks for contradictions itself."""
NAME_LENGTH = 52
"""Room for `-a<attempt>` in a Job's name and for the suffix of its pod."""
NAME_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
SERVER_SET = frozenset({
    "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers", "generation",
    "managedFields", "ownerReferences", "resourceVersion", "selfLink", "uid",
})  # fmt: skip
"""Metadata of an object in a cluster that does not concern the run."""
_ONE_NODE = "write nodes: 1; several are for ranks of a trainer, and a first one for the engine"

ComputePrecision = Literal["Auto", "BF16", "FP32"]


class Model(Block):
    """The base model: frozen, at its deployment precision."""

    uri: Annotated[Uri, LAYOUT, Field(examples=["builtin://tiny-adder"])]
    """A folder in Hugging Face format: a path, `file:///…`, `hf://org/name@revision`, `s3://bucket/prefix`, on a
    cluster `pvc://claim/path`, or `builtin://tiny-adder`, which ships with Orbit. It may move on resume, because a run
    identifies its model by digest."""
    precision: Annotated[Literal["Auto", "BF16", "FP8", "INT4", "NVFP4", "MXFP4"], IDENTITY] = "Auto"
    """Checked against the checkpoint; a mixed checkpoint counts as the format of its routed experts. For `builtin://`
    it selects the variant, and `Auto` means `INT4`."""
    activation_precision: Annotated[Literal["WeightOnly", "FP8", "NVFP4"], IDENTITY] = "WeightOnly"
    """`WeightOnly` does not round activations. `FP8` (W8A8) and `NVFP4` (W4A4) round the inputs of linear layers whose
    weights are in that format, like an engine that multiplies in it; the gradient passes straight through. On a GPU,
    SGLang is asked for kernels that do the same."""
    compute_precision: Annotated[ComputePrecision, LAYOUT] = "Auto"
    """Dtype of activations and products on both sides; norms, softmax, log-probs, loss and optimizer are FP32 in any
    case. `Auto`: BF16 on a GPU, and on a CPU with instructions for it (AMX, AVX512-BF16) for a model from 50 million
    parameters on, with torch's trainer and engine in one process; else FP32. A resumed run computes as its first start
    did."""
    max_sequence_length: Annotated[int, IDENTITY, Field(ge=2, le=1_048_576)] = 2048
    """Maximum length of prompt plus completion, in tokens. A longer prompt is an error, a longer completion is cut."""

    rules = (uri_rule(("builtin", "file", "hf", "s3", "pvc")), MODEL_ON_HUB)


class KeepBest(Block):
    """Policies that are kept for what their evaluation found, besides the newest ones."""

    evaluation: Annotated[
        str | None, LATER_DISPLAY, Field(min_length=1, max_length=NAME_LENGTH, examples=["held-out"])
    ] = None
    """Name of the one of `evaluation.environments` that decides; if unset, the first."""
    metric: Annotated[Literal["Mean", "PassAt"], LATER_DISPLAY] = "Mean"
    """`Mean` is the mean reward of a prompt's samples, `PassAt` the share of prompts of which a sample passes."""
    count: Annotated[int, LATER_DISPLAY, Field(ge=0, le=1000)] = 1
    """Number of best policies to keep; of equal ones the earlier is better. Without `evaluation.everySteps` there are
    none."""


class Checkpoint(Block):
    """How much a killed run can lose, and how many checkpoints are kept."""

    every_steps: Annotated[int, DISPLAY, Field(ge=1, le=1_000_000)] = 1
    """Number of steps between checkpoints; the last step always gets one."""
    keep: Annotated[int, DISPLAY, Field(ge=1, le=1_000_000)] = 3
    """Number of newest complete checkpoints to keep; older ones are deleted."""
    keep_best: KeepBest = KeepBest()
    """Best policies to keep."""
    accept_code: Annotated[bool, LATER_DISPLAY] = False
    """Continue a run whose own code (rewards, environments, tools, objectives) has changed since its last start, as
    `orbit run --accept-code` does. If false, the run is refused (73) and the difference shown."""
    resume_from: Annotated[
        str | None, IDENTITY, Field(min_length=1, max_length=1024, examples=["s3://bucket/runs/quickstart"])
    ] = None
    """Another run's folder, or one checkpoint in it (`…/checkpoints/step-000060`): a new run starts with its adapter,
    its optimiser and its step. The base and `adapter` must be the same; everything else may differ."""

    rules = (uri_rule(STORAGE_SCHEMES, "resumeFrom", unless="!has(self.resumeFrom) || "),)


class Parity(Block):
    """Gate on the log-probs of trainer against engine."""

    preflight: Annotated[Literal["Enforce", "Report"], IDENTITY] = "Enforce"
    """Measured at start and after resume; above the limit, `Enforce` stops the run (84) and `Report` only reports."""
    mean_limit: Annotated[float | None, IDENTITY, Field(gt=0, le=100)] = None
    """Absolute limit of the mean |Δ log-prob|; if unset, the default of the base's precision."""
    p99_limit: Annotated[float | None, IDENTITY, Field(gt=0, le=1000)] = None
    """Limit of the 99th percentile of |Δ log-prob|; if unset, 8 times the limit of the mean. Like the next two limits,
    it applies from 1,000 tokens on."""
    k3_limit: Annotated[float | None, IDENTITY, Field(gt=0, le=1_000_000)] = None
    """Limit of the k3 estimate of the KL divergence; if unset, 16 times the square of the limit of the mean."""
    outside_limit: Annotated[float | None, IDENTITY, Field(gt=0, le=1)] = None
    """Limit of the share of tokens whose probability ratio lies outside [0.9, 1.1]; if unset, exp(-0.1 / limit of the
    mean)."""
    every_steps: Annotated[int | None, LAYOUT, Field(ge=1, le=1_000_000)] = None
    """Interval, in steps, of further measurements, on every server; if unset, only at start, after resume and the first
    wake."""
    floor_factor: Annotated[float, IDENTITY, Field(ge=1, le=1_000_000)] = 10.0
    """The limit is never below this many times the difference of one side from itself, nor above the absolute limit,
    which in BF16 a large such difference raises to 0.05 at most."""
    max_unproven: Annotated[int, LAYOUT, Field(ge=0, le=1_000_000)] = 16
    """Number of publishes in a row that may stay unproven, on servers that cannot read their slots back and are noisier
    than the adapter's effect on the canary; one more stops the run (84). Servers that Orbit starts prove every publish.
    """


class EvaluationEnvironment(Block):
    """Prompts that are never trained on, and how completions for them are scored."""

    name: Annotated[
        str,
        LATER_DISPLAY,
        Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", examples=["held-out"]),
    ]
    """Unique name in results."""
    prompts: Annotated[
        tuple[Prompts, ...],
        AsTuple,
        Field(min_length=1, max_length=16, examples=[[{"uri": "held-out.jsonl"}]]),
    ]
    """Sources, read one after the other."""
    environment: Environment | None = None
    """What the policy acts in and what scores it; if unset, the run's own `spec.environment`."""

    rules = (scored_rule("!has(self.environment)"),)


class Evaluation(Block):
    """What `orbit eval` measures of a policy, and what a run measures of its own."""

    every_steps: Annotated[int | None, LATER_DISPLAY, Field(ge=1, le=1_000_000)] = None
    """Interval, in steps, at which a run evaluates its policy; also before its first step and after its last. If unset,
    never."""
    samples: Annotated[int, LATER_DISPLAY, Field(ge=1, le=1024)] = 1
    """Samples of each prompt."""
    temperature: Annotated[float | None, LATER_DISPLAY, Field(ge=0, le=100)] = None
    """0 takes the most likely token; if unset, as in `rollout.sampling`."""
    max_new_tokens: Annotated[int | None, LATER_DISPLAY, Field(ge=1, le=1_048_576)] = None
    """Maximum length of a completion; if unset, as in `rollout.sampling`."""
    limit: Annotated[int | None, LATER_DISPLAY, Field(ge=1, le=2**53)] = None
    """Number of prompts to use of each environment, counted from the first; if unset, all."""
    seed: Annotated[int, LATER_DISPLAY, Field(ge=0, le=2**53)] = 0
    """Seed of sampling. Every policy draws by the same seed, so that two policies differ only by what they are."""
    pass_at: Annotated[float, LATER_DISPLAY, Field(ge=-1_000_000, le=1_000_000)] = 1.0
    """Reward from which on a sample counts as passed, for pass@k."""
    concurrency: Annotated[int, LATER_DISPLAY, Field(ge=1, le=65_536)] = 64
    """Episodes that query the model at the same time; as many more may be scored meanwhile."""
    prompt_price: Annotated[float | None, LATER_DISPLAY, Field(ge=0, le=1_000_000)] = None
    """Price of a million tokens that a model reads. If set, the cost is reported."""
    completion_price: Annotated[float | None, LATER_DISPLAY, Field(ge=0, le=1_000_000)] = None
    """Price of a million tokens that a model writes."""
    environments: Annotated[
        tuple[EvaluationEnvironment, ...],
        AsTuple,
        Field(max_length=8, examples=[[{"name": "held-out", "prompts": [{"uri": "held-out.jsonl"}]}]]),
    ] = ()
    """What is measured; if empty, the run's own prompts and environment."""

    rules = (Unique("environments", "name", "environment"),)


class Metadata(Block):
    """Name and labels of the run."""

    name: Annotated[
        str, DISPLAY, Field(min_length=1, max_length=NAME_LENGTH, pattern=NAME_PATTERN, examples=["my-run"])
    ]
    """Name of the run and of its folder: lower-case letters, digits and `-`."""
    namespace: Annotated[str | None, DISPLAY, Field(min_length=1, max_length=63, pattern=NAME_PATTERN)] = None
    """Kubernetes namespace; has no effect outside a cluster."""
    labels: Annotated[dict[str, LabelValue], DISPLAY, WithoutEmpty] = Field(default_factory=dict)
    """Kubernetes labels."""
    annotations: Annotated[dict[str, str], DISPLAY, WithoutEmpty] = Field(default_factory=dict)
    """Kubernetes annotations."""

    @model_validator(mode="before")
    @classmethod
    def _drop_server_set(cls, value: Any) -> Any:
        """An object that was read from a cluster is a manifest too."""
        return _without(value, SERVER_SET)

    rules = (label_keys_rule("labels", server=False), check_annotations)


class RunSpec(Block):
    """The complete specification of a run."""

    model: Model
    """The frozen base."""
    adapter: Adapter = Adapter()
    """The part that is trained."""
    algorithm: Algorithm = Algorithm()
    """The learning rule."""
    data: Data
    """The prompts."""
    environment: Annotated[Environment, SHOWN] = Environment()
    """What the policy acts in and what scores it. `algorithm.type: SFT` needs none, but `orbit eval` uses it there too.
    """
    rollout: Rollout = Rollout()
    """How completions are sampled."""
    training: Training
    """How the adapter is trained."""
    parity: Parity = Parity()
    """How far trainer and engine may differ."""
    evaluation: Evaluation = Evaluation()
    """What `orbit eval` measures."""
    checkpoint: Checkpoint = Checkpoint()
    """How often the run is saved."""
    storage: Storage = Storage()
    """Where the run is stored."""
    placement: Placement = Placement()
    """Nodes, GPUs and pod of the run."""
    lifecycle: Lifecycle = Lifecycle()
    """When the run starts, pauses and is retried on a cluster."""
    observability: Observability = Observability()
    """Metrics, logs and notifications."""

    @property
    def new_tokens(self) -> int:
        """`rollout.sampling.maxNewTokens`; as long as no run has decided it, the most that it can be."""
        return self.rollout.sampling.max_new_tokens or self.model.max_sequence_length - 1

    rules = (
        Rule(
            "rollout.sampling.maxNewTokens",
            "self.algorithm.type == 'SFT' || self.model.maxSequenceLength < 2"
            " || !has(self.rollout.sampling.maxNewTokens)"
            " || self.rollout.sampling.maxNewTokens < self.model.maxSequenceLength",
            "{self.rollout.sampling.max_new_tokens} leaves no room for a prompt within `spec.model.maxSequenceLength`"
            " ({self.model.max_sequence_length})",
            "lower `maxNewTokens`, or raise `spec.model.maxSequenceLength`",
            server="leave room for a prompt: lower it, or raise model.maxSequenceLength",
        ),
        Rule(
            "rollout.maxStaleness",
            f"self.rollout.maxStaleness <= 0 || {max_rounds('self.algorithm')} <= 0",
            "prompts that dynamic sampling draws for one step would be those of a step that has begun",
            "write `maxStaleness: 0`, or `dynamicSampling: {{maxRounds: 0}}` in `spec.algorithm`",
        ),
        Rule(
            "rollout.overSampling",
            "self.algorithm.type != 'SFT' || self.rollout.overSampling <= 0",
            "with `spec.algorithm.type: SFT` nothing is sampled that could be cancelled",
            "remove `overSampling`",
            server="remove it: SFT samples nothing",
        ),
        scored_rule("self.algorithm.type == 'SFT'"),
        Rule(
            "algorithm.critic.rank",
            "!has(self.algorithm.critic) || !has(self.algorithm.critic.rank) || self.adapter.type == 'LoRA'",
            "an adapter of `spec.adapter.type: {self.adapter.type}` has no rank: a critic has the policy's blocks",
            "remove `rank`",
            server="remove it: an OFT adapter has no rank",
        ),
        Rule(
            "adapter.initFrom",
            "!has(self.adapter.initFrom) || !has(self.checkpoint.resumeFrom)",
            "`spec.checkpoint.resumeFrom` brings an adapter already, with its optimizer",
            "remove one of them",
            server="remove it, or checkpoint.resumeFrom",
        ),
        Rule(
            "checkpoint.keepBest.evaluation",
            "!has(self.checkpoint.keepBest.evaluation)"
            " || self.evaluation.environments.exists(o, o.name == self.checkpoint.keepBest.evaluation)",
            "there is no evaluation `{self.checkpoint.keep_best.evaluation}` in `spec.evaluation.environments`",
            "name one of those, or leave it out for the first",
        ),
        Rule(
            "training.stopWhen",
            "!has(self.training.stopWhen) || (self.algorithm.type == 'SFT' ? has(self.data.validation)"
            " : has(self.evaluation.everySteps))",
            "nothing is measured by which the run could end",
            "set `spec.evaluation.everySteps`, or with `algorithm.type: SFT` `spec.data.validation`",
        ),
        Rule(
            "training.stopWhen.evaluation",
            "!has(self.training.stopWhen) || !has(self.training.stopWhen.evaluation)"
            " || (self.algorithm.type == 'SFT' ? self.training.stopWhen.evaluation == 'held-out'"
            " : self.evaluation.environments.exists(o, o.name == self.training.stopWhen.evaluation))",
            "there is no evaluation `{self.training.stop_when.evaluation}`",
            "name one of `spec.evaluation.environments`, with `algorithm.type: SFT` `held-out`, or leave it out",
        ),
        Rule(
            "training.stopWhen.metric",
            "self.algorithm.type != 'SFT' || !has(self.training.stopWhen) || self.training.stopWhen.metric != 'PassAt'",
            "demonstrations have a loss, and no samples that could pass",
            "remove `metric`",
        ),
        Rule(
            "placement.layout",
            "self.placement.layout != 'Split' || self.rollout.engine == 'SGLang'",
            "with `spec.rollout.engine: {self.rollout.engine}` nothing would run on the engine's half of the GPUs",
            "write `engine: SGLang` in `spec.rollout`, or `layout: Colocated`",
        ),
        Rule(
            "placement.layout",
            "self.placement.layout != 'Split' || self.algorithm.type != 'SFT' || self.rollout.engine != 'SGLang'",
            "with `spec.algorithm.type: SFT` no engine runs, so its half of the GPUs would be idle",
            "write `layout: Colocated`",
        ),
        Rule(
            "rollout.adapterTransport",
            "self.placement.layout != 'Split' || self.rollout.adapterTransport != 'SharedMemory'",
            "with `spec.placement.layout: Split` the engine's container does not see the trainer's memory",
            "write `File`, or leave it out",
        ),
        Rule(
            "placement.nodes",
            "self.placement.nodes == 1 || self.training.trainer != 'Torch'",
            "`spec.training.trainer: Torch` is one process, and the other nodes would be idle",
            "write `trainer: Megatron` or `Auto`, or `nodes: 1`",
        ),
        Rule(
            "placement.nodes",
            "self.placement.nodes == 1 || self.adapter.type != 'Full'",
            "a model that is trained whole (`spec.adapter.type: Full`) is not divided among ranks",
            "write `nodes: 1`",
            server=_ONE_NODE,
        ),
        Rule(
            "placement.nodes",
            "self.placement.nodes == 1 || self.algorithm.type != 'SFT'",
            "with `spec.algorithm.type: SFT` no engine runs, so the first node would be idle",
            "write `nodes: 1`",
            server=_ONE_NODE,
        ),
    )


class OrbitRun(Block):
    """One RL run: the same object in the file, in the cluster and in Python."""

    api_version: Annotated[Literal["orbitrl.dev/v1alpha1"], IDENTITY, Field(examples=[API_VERSION])]
    """Version of this format."""
    kind: Annotated[Literal["OrbitRun"], IDENTITY, Field(examples=["OrbitRun"])]
    """Kind of object."""
    metadata: Metadata
    """Name and labels of the run."""
    spec: RunSpec
    """The complete specification of the run."""

    _folder: Path | None = PrivateAttr(None)

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def folder(self) -> Path | None:
        """The folder in which relative paths start; None for the working folder."""
        return self._folder

    def beside(self, folder: Path | None) -> Self:
        """The same manifest, its relative paths starting there."""
        copy = self.model_copy()
        copy._folder = folder
        return copy

    def to_manifest(self) -> dict[str, Any]:
        """The manifest as plain values, camelCase, defaults written out; `OrbitRun.model_validate` reads it back."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_status(cls, value: Any) -> Any:
        """Accepts what `kubectl get -o yaml` prints."""
        return _without(value, {"status"})

    @model_validator(mode="after")
    def _check_contradictions(self, info: ValidationInfo) -> Self:
        if info.context == COLLECTING:
            return self
        found = list(find_contradictions(self))
        if found:
            message = "; ".join(f"{'.'.join(map(str, each.at))}: {each.message}" for each in found)
            raise PydanticCustomError("contradiction", "{text}", {"text": message, "found": found})
        return self


def upgrade_manifest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest that was accepted when it was stored, in a run folder or a cluster, as this version accepts it."""
    spec = manifest["spec"]
    rollout = spec.get("rollout") or {}
    if rollout.get("adapterTransport") == "Broadcast":
        is_split = (spec.get("placement") or {}).get("layout") == "Split"
        rollout = {**rollout, "adapterTransport": "File" if is_split else "SharedMemory"}
        spec = {**spec, "rollout": rollout}
    return {**manifest, "spec": spec}


def _without(value: Any, names: Collection[str]) -> Any:
    return {name: each for name, each in value.items() if name not in names} if isinstance(value, Mapping) else value


def find_contradictions(block: Block, path: tuple[str | int, ...] = ()) -> Iterator[Contradiction]:
    """Errors in a block and below it, with paths from the outermost block."""
    for rule in block.rules:
        for each in rule(block):
            yield each._replace(at=(*path, *each.at), involves=tuple((*path, *other) for other in each.involves))
    for inner in inner_blocks(type(block)):
        value, here = getattr(block, inner.name), (*path, inner.alias)
        if inner.is_list:
            for index, item in enumerate(value):
                yield from find_contradictions(item, (*here, index))
        elif value is not None:
            yield from find_contradictions(value, here)
