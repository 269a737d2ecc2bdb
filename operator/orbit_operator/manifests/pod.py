"""The pod of an attempt: what it requests, what it may do, what it mounts.

Belongs here: the pod template, for both layouts. Does not belong here: the Job around it (`job`).
The pod meets the *restricted* pod security standard, has no service-account token, and a read-only root file system.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from orbit_operator.facts import ENGINE_CONTAINER, RUN_CONTAINER
from orbit_operator.manifests.config_map import MANIFEST_FILE
from orbit_operator.manifests.mounts import AUTHORITIES_FOLDER, build_mounts
from orbit_operator.manifests.source import (
    Object,
    RunSource,
    config_map_name,
    job_name,
    labels,
    merge,
    metrics_port_of,
    ray_address,
)
from orbit_operator.settings import Settings
from orbit_runtime.planner.job import split_devices
from orbit_runtime.spec.placement import Placement, Toleration, halve

GPU = "nvidia.com/gpu"
MANIFEST_FOLDER, CACHE_FOLDER, WORK_FOLDER = "/etc/orbit", "/var/cache/orbit", "/var/lib/orbit"
TOKEN_FOLDER = "/run/orbit"
"""An in-memory folder shared by the two containers of a `Split` pod only."""
ENGINE_PORT = 9401
TERMINATION_FILE = "/dev/termination-log"
"""File in which the kubelet looks for a container's termination message."""
AUTHORITY_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
"""Variables by which the store's client and Python's HTTP clients find the authorities that they trust."""
AVOIDANCE_WEIGHT = 100
"""The maximum: any other node is preferred to one that failed, yet a cluster of one node can still continue."""


def build_pod_template(source: RunSource, attempt: int, avoid_nodes: Sequence[str], settings: Settings) -> Object:
    """The pod template of the attempt's Job."""
    spec, placement = source.manifest.spec, source.manifest.spec.placement
    extra_volumes, extra_mounts = build_mounts(source.spec, settings)
    run = build_container(source, attempt, extra_mounts, settings)
    pod: Object = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": spec.lifecycle.termination_grace_period_seconds,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(settings),
        "containers": [run],
        "volumes": [*build_volumes(source), *extra_volumes],
        "tolerations": build_tolerations(placement, settings),
    }
    if placement.layout == "Split":
        pod["initContainers"] = [_engine(run, source, settings)]
    if spec.storage.service_account_name:
        pod["serviceAccountName"] = spec.storage.service_account_name
    if settings.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    if selector := build_node_selector(placement, settings):
        pod["nodeSelector"] = selector
    if settings.run_priority_class:
        pod["priorityClassName"] = settings.run_priority_class
    affinity = node_affinity(placement, avoid_nodes)
    if affinity:
        pod["affinity"] = {"nodeAffinity": affinity}
    return customise(source, {"metadata": build_pod_metadata(labels(source, attempt), settings), "spec": pod})


def customise(source: RunSource, template: Object, without: Collection[str] = ()) -> Object:
    """The template with what the installation and the manifest add (`placement.pod`), but for the fields `without`."""
    asked = {name: each for name, each in source.pod.items() if name not in (*without, "labels", "gpuResource")}
    annotations = asked.pop("annotations", {})
    inside = {name: asked.pop(name) for name in ("env", "volumeMounts", "resources") if name in asked}
    if "resources" in inside:
        inside["resources"] = {"requests": inside["resources"].get("limits", {}), **inside["resources"]}
    made: Object = merge(template, {"metadata": {"annotations": annotations} if annotations else {}, "spec": asked})
    for containers in ("initContainers", "containers"):
        for index, each in enumerate(made["spec"].get(containers, ())):
            container = merge(each, inside)
            container["env"] = [*{pair["name"]: pair for pair in container["env"]}.values()]
            made["spec"][containers][index] = container
    return made


def build_container(source: RunSource, attempt: int, extra_mounts: list[Object], settings: Settings) -> Object:
    """The container that runs `orbit run`. In a `Split` pod it gets the trainer's GPUs and half of everything else."""
    placement = source.manifest.spec.placement
    split, devices = placement.layout == "Split", split_devices(placement, placement.gpus)
    secrets = [source.manifest.spec.storage.credentials_secret_name, *placement.env_from_secrets]
    container: Object = {
        "name": RUN_CONTAINER,
        "image": placement.image or settings.runtime_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["orbit"],
        "args": ["run", f"{MANIFEST_FOLDER}/{MANIFEST_FILE}"],
        "workingDir": WORK_FOLDER,
        "env": [
            {"name": "ORBIT_ATTEMPT", "value": job_name(source.name, attempt)},
            {"name": "ORBIT_BIND_ADDRESS", "value": "::"},
            {"name": "ORBIT_CACHE", "value": CACHE_FOLDER},
            {"name": "ORBIT_TERMINATION_FILE", "value": TERMINATION_FILE},
            *installed_variables(settings),
            *(_engine_variables() if split else []),
            *_ray_variables(source, attempt),
        ],
        "envFrom": [{"secretRef": {"name": name}} for name in dict.fromkeys(filter(None, secrets))],
        "resources": _resources(source, settings, len(devices.trainer), halved=split),
        "securityContext": container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "manifest", "mountPath": MANIFEST_FOLDER, "readOnly": True},
            {"name": "work", "mountPath": WORK_FOLDER},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "cache", "mountPath": CACHE_FOLDER},
            *([{"name": "token", "mountPath": TOKEN_FOLDER}] if split else []),
            *extra_mounts,
        ],
    }
    if (port := metrics_port_of(source.spec)) is not None:
        # Ready means that the run answers requests, not that the model is loaded: queues time out on readiness.
        probe = {"httpGet": {"path": "/healthz", "port": "metrics"}, "periodSeconds": 10, "timeoutSeconds": 5}
        container["ports"] = [{"name": "metrics", "containerPort": port, "protocol": "TCP"}]
        container["readinessProbe"] = {**probe, "failureThreshold": 3}
    return container


def build_pod_metadata(own: Object, settings: Settings) -> Object:
    """Adds the installation's labels and annotations; our own labels take precedence."""
    annotations = {"annotations": dict(settings.run_pod_annotations)} if settings.run_pod_annotations else {}
    return {"labels": {**settings.run_pod_labels, **own}, **annotations}


def build_node_selector(placement: Placement, settings: Settings) -> dict[str, str]:
    """The installation's labels and the manifest's, which take precedence."""
    return {**settings.run_node_selector, **placement.node_selector}


def installed_variables(settings: Settings) -> list[Object]:
    """What every container of a run gets: a home that is writable, and the installation's variables."""
    pairs = {"HOME": "/tmp"}
    if settings.run_ca_config_map:
        pairs |= dict.fromkeys(AUTHORITY_VARIABLES, f"{AUTHORITIES_FOLDER}/ca.crt")
    return [{"name": name, "value": value} for name, value in {**pairs, **settings.run_env}.items()]


def pod_security(settings: Settings) -> Object:
    user = settings.run_as_user
    return {
        "runAsNonRoot": True,
        **({} if user < 0 else {"runAsUser": user, "runAsGroup": user, "fsGroup": user}),
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Object:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _engine_variables() -> list[Object]:
    """The address at which the engine's agent listens, and the file with the token that it accepts."""
    return [
        {"name": "ORBIT_ENGINE_URL", "value": f"http://127.0.0.1:{ENGINE_PORT}"},
        {"name": "ORBIT_TOKEN_FILE", "value": f"{TOKEN_FOLDER}/token"},
    ]


def _ray_variables(source: RunSource, attempt: int) -> list[Object]:
    """The address of the ranks of a run over several nodes."""
    if source.manifest.spec.placement.nodes == 1:
        return []
    return [
        {"name": "RAY_ADDRESS", "value": ray_address(source.name, attempt)},
        {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"},
    ]


def _engine(run: Object, source: RunSource, settings: Settings) -> Object:
    """The engine as a native sidecar, which starts before the run's container and ends after it.

    Its agent starts servers when the run requests them, and is reachable from this pod only. Models, adapters and the
    token are in volumes that both containers share.
    """
    placement = source.manifest.spec.placement
    shared = {"ORBIT_CACHE", "ORBIT_TOKEN_FILE", *(each["name"] for each in installed_variables(settings))}
    return {
        **{name: run[name] for name in ("imagePullPolicy", "workingDir", "envFrom", "volumeMounts",
                                        "securityContext", "terminationMessagePolicy", "command")},
        "name": ENGINE_CONTAINER,
        "image": settings.engine_image or run["image"],
        "args": ["agent", "--port", str(ENGINE_PORT)],
        "resources": _resources(source, settings, len(split_devices(placement, placement.gpus).engine), halved=True),
        "env": [each for each in run["env"] if each["name"] in shared],
        "restartPolicy": "Always",
    }  # fmt: skip


def _resources(source: RunSource, settings: Settings, gpus: int, *, halved: bool) -> Object:
    """Requests equal limits, so that nothing on the node can take them away and the CPU manager may pin cores.

    Cores that were not specified are only requested: a guaranteed share when cores are short, all of them otherwise.
    """
    asked, gpu = source.manifest.spec.placement.resources, source.pod.get("gpuResource", GPU)
    cpu = asked.cpu if asked.cpu is not None else settings.run_cpu
    memory = asked.memory if asked.memory is not None else settings.run_memory
    amounts: dict[str, str] = {}
    if cpu:
        amounts["cpu"] = f"{cpu * 500}m" if halved else str(cpu)
    if memory:
        amounts["memory"] = halve(memory) if halved else memory
    if asked.ephemeral_storage is not None:
        amounts["ephemeral-storage"] = halve(asked.ephemeral_storage) if halved else asked.ephemeral_storage
    if gpus and gpu:
        amounts[gpu] = str(gpus)
    requests = dict(amounts)
    if not cpu and settings.run_cpu_per_gpu:
        # A run without GPUs can load and train on one core, slowly; this share keeps it alive.
        cores = settings.run_cpu_per_gpu * gpus if gpus else 1.0
        requests["cpu"] = f"{math.ceil(cores * 1000)}m"
    return {name: each for name, each in (("requests", requests), ("limits", amounts)) if each}


def build_volumes(source: RunSource) -> list[Object]:
    """Volumes that every pod of a run mounts, besides those that its manifest names."""
    placement = source.manifest.spec.placement
    cache, split = placement.model_cache, placement.layout == "Split"
    if cache.claim_name is not None:
        kept: Object = {"persistentVolumeClaim": {"claimName": cache.claim_name}}
    else:
        kept = {"emptyDir": {} if cache.size_limit is None else {"sizeLimit": cache.size_limit}}
    return [
        {"name": "manifest", "configMap": {"name": config_map_name(source.name)}},
        {"name": "work", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": placement.resources.shared_memory}},
        {"name": "cache", **kept},
        *([{"name": "token", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}] if split else []),
    ]


def build_tolerations(placement: Placement, settings: Settings) -> list[Object]:
    """Tolerations of an attempt, and of other pods meant for the same nodes."""
    seconds = int(settings.node_lost_seconds)
    away = [
        {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}
        for key in ("not-ready", "unreachable")
    ]
    own = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}] if placement.gpus else []
    named = dict.fromkeys((*placement.tolerations, *settings.run_tolerations))
    return [*own, *away, *(_toleration(each) for each in named)]


def _toleration(each: Toleration) -> Object:
    fields = {
        "key": each.key, "operator": each.operator, "value": each.value, "effect": each.effect,
        "tolerationSeconds": each.toleration_seconds,
    }  # fmt: skip
    return {name: value for name, value in fields.items() if value is not None}


def node_affinity(placement: Placement, avoid_nodes: Sequence[str]) -> Object:
    """Requires the GPU that was named, and prefers nodes that did not fail."""
    affinity: Object = {}
    if placement.gpu_product is not None:
        product = {"key": "nvidia.com/gpu.product", "operator": "In", "values": [placement.gpu_product]}
        affinity["requiredDuringSchedulingIgnoredDuringExecution"] = {
            "nodeSelectorTerms": [{"matchExpressions": [product]}]
        }
    if avoid_nodes:
        others = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(avoid_nodes)}
        affinity["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {"weight": AVOIDANCE_WEIGHT, "preference": {"matchExpressions": [others]}}
        ]
    return affinity
