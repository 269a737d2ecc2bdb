"""`spec.placement`: which part of a cluster a run gets.

Belongs here: what the run's pod asks for and may reach. Does not belong here: making the pod (the operator).

Only the operator reads this block; `orbit run` accepts it and takes the machine it is on, so one file does for both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from orbit_runtime.spec.block import (
    LABEL_FIX,
    LABEL_KEY,
    LAYOUT,
    VARIABLE_PATTERN,
    AsTuple,
    Block,
    Contradiction,
    LabelName,
    LabelValue,
    ObjectName,
    Quantity,
    Rule,
    Unique,
    WithoutEmpty,
    is_label_key,
    is_label_value,
    label_keys_rule,
)

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def read_quantity(text: str) -> int:
    """Bytes. Example: `read_quantity("2Gi") == 2147483648`."""
    match = re.fullmatch(r"([0-9]+)([A-Za-z]*)", text)
    assert match is not None, text
    return int(match[1]) * _UNITS[match[2]]


def halve(text: str) -> str:
    """Half of a quantity, in the largest unit that needs no fraction. Example: `halve("1Gi") == "512Mi"`."""
    half = read_quantity(text) // 2
    unit = max((unit for unit, size in _UNITS.items() if half % size == 0), key=lambda unit: (_UNITS[unit], len(unit)))
    return f"{half // _UNITS[unit]}{unit}"


MAX_GPUS = 16
MAX_NODES = 64
CIDR_PATTERN = r"^[0-9A-Fa-f.:]+/(0|[1-9][0-9]{0,2})$"


class Resources(Block):
    """What the pod requests besides GPUs. Requests equal limits, so nothing else on the node can take these resources
    away."""

    cpu: Annotated[int | None, LAYOUT, Field(ge=1, le=1024, examples=[64])] = None
    """Whole cores; if unset, the value of the chart."""
    memory: Annotated[Quantity | None, LAYOUT, Field(examples=["1Ti"])] = None
    """Main memory, `sharedMemory` included; if unset, the value of the chart."""
    ephemeral_storage: Annotated[Quantity | None, LAYOUT, Field(examples=["200Gi"])] = None
    """Local disk: logs, `/tmp` and a model cache without a claim; if unset, no limit."""
    shared_memory: Annotated[Quantity, LAYOUT] = "16Gi"
    """Size of `/dev/shm`, which NCCL and the engine need; what is used of it counts as memory."""


class ModelCache(Block):
    """Where a downloaded model and its prompts are stored."""

    claim_name: Annotated[ObjectName | None, LAYOUT, Field(examples=["model-cache"])] = None
    """PersistentVolumeClaim in the run's namespace, shared by runs; alternatively, set `sizeLimit`."""
    size_limit: Annotated[Quantity | None, LAYOUT, Field(examples=["2Ti"])] = None
    """Limit of a folder on the node that lives as long as the pod; alternatively, set `claimName`. With neither, there
    is no limit."""

    rules = (
        Rule(
            "sizeLimit",
            "!has(self.claimName) || !has(self.sizeLimit)",
            "a claim has its own size, so this field does nothing",
            "remove `sizeLimit` or `claimName`",
        ),
    )


class Egress(Block):
    """Connections that the run's network policy allows, besides DNS and HTTPS."""

    cidr: Annotated[
        str | None, LAYOUT, Field(min_length=1, max_length=43, pattern=CIDR_PATTERN, examples=["10.0.0.0/8"])
    ] = None
    """Range of addresses; alternatively, set `namespace`."""
    namespace: Annotated[LabelName | None, LAYOUT, Field(examples=["minio"])] = None
    """Every pod of a namespace; alternatively, set `cidr`."""
    ports: Annotated[
        tuple[Annotated[int, Field(ge=1, le=65535)], ...], AsTuple, LAYOUT, Field(max_length=16, examples=[[9000]])
    ] = ()
    """TCP ports; if empty, all."""

    rules = (
        Rule(
            "",
            "has(self.cidr) || has(self.namespace)",
            "egress needs a `cidr` or a `namespace`",
            "add `cidr: 10.0.0.0/8`, or `namespace: minio`",
        ),
        Rule(
            "namespace",
            "!has(self.cidr) || !has(self.namespace)",
            "egress goes to a `cidr` or a `namespace`, not both",
            "write one entry for each",
        ),
        Rule(
            "cidr",
            "!has(self.cidr) || isCIDR(self.cidr)",
            "`{self.cidr}` is not a network",
            "write e.g. `10.0.0.0/8`",
            server="write a network such as 10.0.0.0/8",
        ),
        Unique("ports"),
    )


class Toleration(Block):
    """A taint that the pod tolerates; the taint of GPU nodes is always tolerated."""

    key: Annotated[str | None, LAYOUT, Field(min_length=1, max_length=317)] = None
    """Key of the taint; if unset, every taint, with `operator: Exists`."""
    operator: Annotated[Literal["Equal", "Exists"], LAYOUT] = "Equal"
    """`Equal` compares the value, `Exists` accepts any."""
    value: Annotated[LabelValue | None, LAYOUT] = None
    """Value of the taint with `Equal`; if unset, the empty value."""
    effect: Annotated[Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None, LAYOUT] = None
    """Effect of the taint; if unset, every effect."""
    toleration_seconds: Annotated[int | None, LAYOUT, Field(ge=0, le=2**31 - 1)] = None
    """How long `NoExecute` is tolerated; if unset, for ever."""

    rules = (
        Rule(
            "value",
            "self.operator != 'Exists' || !has(self.value)",
            "`Exists` takes any value, so this field does nothing",
            "remove `value`, or write `operator: Equal`",
        ),
        Rule(
            "key",
            "has(self.key) || self.operator == 'Exists'",
            "`Equal` needs a key",
            "add `key`, or write `operator: Exists`",
        ),
        Rule(
            "tolerationSeconds",
            "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            "only `NoExecute` ends after a time, so this field does nothing",
            "remove `tolerationSeconds`, or write `effect: NoExecute`",
        ),
        Rule(
            "key",
            f"!has(self.key) || self.key.matches({LABEL_KEY!r})",
            "`{self.key}` cannot be the key of a label",
            LABEL_FIX,
            server="write letters, digits, '-', '_' and '.', with a domain and '/' before them if need be",
        ),
    )


RESERVED = re.compile(
    r"([^/]+\.)?orbitrl\.dev/.*|app\.kubernetes\.io/(name|instance|component|part-of|managed-by)"
    r"|batch\.kubernetes\.io/.*|controller-uid|job-name|kueue\.x-k8s\.io/queue-name"
)
"""Keys of labels that Orbit or a controller sets on the objects of a run."""
OWN_VARIABLE = re.compile(r"ORBIT_.*|RAY_ADDRESS|RAY_USAGE_STATS_ENABLED|HOME")
"""Variables that Orbit sets in the pods of a run."""
_VOLUMES = ("configMap", "emptyDir", "persistentVolumeClaim", "secret")
POD_FIELDS: Mapping[str, tuple[type, tuple[str, ...]]] = {
    "labels": (dict, ()),
    "annotations": (dict, ()),
    "securityContext": (dict, ("runAsUser", "runAsGroup", "fsGroup", "supplementalGroups")),
    "priorityClassName": (str, ()),
    "runtimeClassName": (str, ()),
    "schedulerName": (str, ()),
    "imagePullSecrets": (list, ("name",)),
    "env": (list, ("name", "value")),
    "volumes": (list, ("name", *_VOLUMES)),
    "volumeMounts": (list, ("name", "mountPath", "subPath", "readOnly")),
    "affinity": (dict, ("podAffinity", "podAntiAffinity")),
    "topologySpreadConstraints": (list, ()),
    "resourceClaims": (list, ("name", "resourceClaimName", "resourceClaimTemplateName")),
    "resources": (dict, ("limits", "claims")),
    "gpuResource": (str, ()),
}
"""Field of `placement.pod` → its kind, and the fields that it or each of its items may have, if not any."""
_KINDS: Mapping[type, str] = {dict: "a mapping", list: "a list of mappings", str: "a text"}


def check_pod(placement: Any) -> Iterator[Contradiction]:
    """In Python, because CEL cannot read a mapping whose values are of any type. The rest of them the API server checks
    when the pod's Job is created."""
    pod: Mapping[str, Any] = placement.pod
    for name, value in pod.items():
        for message, fix in _find_mistakes(name, value):
            yield Contradiction(("pod", name), (), message, fix)
    by_claims = pod.get("gpuResource") == "" and placement.gpus > 0
    if by_claims and (placement.layout == "Split" or not pod.get("resourceClaims")):
        message = "no resource is asked for, so that the pod gets its GPUs by claims, which `Split` cannot divide"
        yield Contradiction(("pod", "gpuResource"), (("layout",),), message, "add `resourceClaims`, with one container")


def _find_mistakes(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Message and fix of each."""
    kind: Any
    kind, known = POD_FIELDS.get(name, (object, ()))
    items: list[Any] = value if isinstance(value, list) else [value]
    if not isinstance(value, kind) or (kind is list and not all(isinstance(each, dict) for each in items)):
        yield f"this is not {_KINDS[kind]}", f"write {_KINDS[kind]}"
        return
    if strange := [key for each in items if known for key in each if key not in known]:
        yield f"`{strange[0]}` is not allowed here", f"allowed: {', '.join(known)}"
    elif name in ("labels", "annotations"):
        for key, text in value.items():
            good = isinstance(text, str) and (name == "annotations" or is_label_value(text))
            if not good or not is_label_key(key) or RESERVED.fullmatch(key):
                yield f"`{key}` is set by Orbit, or it or its value cannot be of a label", "choose another key or value"
    elif name == "env":
        names = [str(each.get("name", "")) for each in items]
        for each in names:
            if not re.fullmatch(VARIABLE_PATTERN, each) or OWN_VARIABLE.fullmatch(each):
                yield f"`{each}` is set by Orbit, or no variable can have this name", "choose another name"
    elif name == "volumes":
        if not all(any(kind in each for kind in _VOLUMES) for each in items):
            yield "a volume has no source", f"add one of {', '.join(_VOLUMES)}"
    elif name == "resources":
        limits = value.get("limits", {})
        if not isinstance(limits, dict):
            yield "`limits`: this is not a mapping", "write e.g. `limits: {rdma/ib: 1}`"
            return
        plain = [each for each in limits if "/" not in each and not each.startswith("hugepages-")]
        if plain:
            yield f"`{plain[0]}` has a field of its own", "write `placement.resources`; here go e.g. `rdma/ib`"


class Placement(Block):
    """The run's pod on a cluster. Elsewhere a run reads only `layout`, `trainerGpus`, `nodes` and `baseCopies`; `orbit
    plan` also reads `gpus` and `gpuProduct`."""

    layout: Annotated[Literal["Colocated", "Split"], LAYOUT] = "Colocated"
    """`Colocated`: trainer and engine take turns on all GPUs, in one container. `Split`: each has GPUs of its own; on a
    cluster also a container of its own, with half of the pod's memory and cores; on one machine they run side by side.
    """
    gpus: Annotated[int, LAYOUT, Field(ge=0, le=MAX_GPUS)] = 8
    """GPUs of each node, which is all of the pod's GPUs when there is one node. 0 runs on the CPU."""
    nodes: Annotated[int, LAYOUT, Field(ge=1, le=MAX_NODES, examples=[2])] = 1
    """With more than one, the first node holds the run and its engine, and the others the trainer's ranks, joined by
    Ray: on a cluster a KubeRay RayCluster, elsewhere the Ray that `RAY_ADDRESS` names. With neither, Orbit takes the
    machine as it is."""
    trainer_gpus: Annotated[int | None, LAYOUT, Field(ge=1, le=MAX_GPUS - 1, examples=[1])] = None
    """With `layout: Split`: the trainer has this many GPUs, the first ones, and the engine's servers the others
    (`replicas`, `tensorParallel`). If unset, half."""
    gpu_product: Annotated[LabelValue | None, LAYOUT, Field(min_length=1, examples=["NVIDIA-B200"])] = None
    """Only nodes whose label `nvidia.com/gpu.product` has this value; if unset, any."""
    base_copies: Annotated[Literal["Auto", "Shared", "Two"], LAYOUT] = "Auto"
    """Whether trainer and engine each hold a copy of the base or share one; `Auto` makes two if they fit."""
    image: Annotated[
        str | None,
        LAYOUT,
        Field(min_length=1, max_length=512, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$", examples=["orbit-runtime:1.0"]),
    ] = None
    """Container image of the run; if unset, the chart's."""
    resources: Resources = Resources()
    """What the pod requests besides GPUs."""
    model_cache: ModelCache = ModelCache()
    """Where a downloaded model is stored."""
    env_from_secrets: Annotated[tuple[ObjectName, ...], AsTuple, LAYOUT, Field(max_length=16)] = ()
    """Secrets whose keys become environment variables of the run, such as a hub token."""
    egress: Annotated[tuple[Egress, ...], AsTuple, Field(max_length=16, examples=[[{"cidr": "10.0.0.0/8"}]])] = ()
    """What the run may connect to, besides DNS and HTTPS."""
    node_selector: Annotated[dict[str, LabelValue], LAYOUT, Field(max_length=16), WithoutEmpty] = Field(
        default_factory=dict
    )
    """Labels that the node must have."""
    tolerations: Annotated[
        tuple[Toleration, ...], AsTuple, Field(max_length=16, examples=[[{"operator": "Exists"}]])
    ] = ()
    """Taints that the pod tolerates."""
    pod: Annotated[dict[str, JsonValue], LAYOUT, Field(max_length=16, examples=[{"runtimeClassName": "nvidia"}])] = (
        Field(default_factory=dict)
    )
    """What else the run's pods have, as Kubernetes spells it: `labels` (of all objects of the run), `annotations`,
    `securityContext` (user and groups), `priorityClassName`, `runtimeClassName`, `schedulerName`, `imagePullSecrets`,
    `env`, `volumes`, `volumeMounts`, `affinity` (to pods), `topologySpreadConstraints`, `resourceClaims`, `resources`
    (limits such as `rdma/ib`, and claims); and `gpuResource`, the name by which GPUs are requested: `nvidia.com/gpu`
    if unset, none if empty."""

    rules = (
        Rule(
            "pod",
            f"key in {list(POD_FIELDS)!r}",
            "a run's pod takes no `{key}`",
            f"allowed: {', '.join(POD_FIELDS)}",
            each_key=True,
            server=False,
        ),
        check_pod,
        Rule(
            "layout",
            "self.nodes == 1 || self.layout != 'Split'",
            "with several `nodes` trainer and engine have nodes of their own, so this field does nothing",
            "remove `layout`, or write `nodes: 1`",
        ),
        Rule(
            "trainerGpus",
            "self.nodes == 1 || !has(self.trainerGpus)",
            "with several `nodes` the trainer has whole nodes, so this field does nothing",
            "remove `trainerGpus`",
        ),
        Rule(
            "trainerGpus",
            "self.nodes > 1 || !has(self.trainerGpus) || self.layout == 'Split'",
            "with `layout: Colocated` trainer and engine share all GPUs, so this field does nothing",
            "remove `trainerGpus`, or write `layout: Split`",
            rests_on=("layout",),
        ),
        Rule(
            "gpus",
            "self.nodes > 1 || self.layout != 'Split' || "
            "(self.gpus >= 2 && (has(self.trainerGpus) || self.gpus % 2 == 0))",
            "{self.gpus} GPUs cannot be halved between trainer and engine",
            "write an even number of at least 2, or add `trainerGpus: 1`, or write `layout: Colocated`",
            rests_on=("layout",),
        ),
        Rule(
            "trainerGpus",
            "self.nodes > 1 || !has(self.trainerGpus) || self.layout != 'Split' || self.gpus < 2"
            " || self.trainerGpus < self.gpus",
            "{self.trainer_gpus} of {self.gpus} GPUs leave the engine none",
            "write at most {more}, or raise `gpus`",
            rests_on=("gpus",),
            more=lambda self: self.gpus - 1,
            server="write layout: Split, and fewer than gpus; or remove it",
        ),
        Unique("envFromSecrets"),
        label_keys_rule("nodeSelector"),
    )
