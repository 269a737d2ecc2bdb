"""What a run becomes in the cluster, against golden files.

`ORBIT_TEST_WRITE_GOLDEN=1` writes them anew; read the difference before it is committed.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orbit_operator.manifests.cleanup import build_cleanup_job
from orbit_operator.manifests.config_map import build_config_map
from orbit_operator.manifests.job import build_job
from orbit_operator.manifests.mounts import build_mounts, localise
from orbit_operator.manifests.network_policy import build_network_policy
from orbit_operator.manifests.ray_cluster import build_ray_cluster
from orbit_operator.manifests.source import Object, RunSource, labels
from orbit_operator.observe import judge_manifest
from orbit_operator.read import lifecycle_of
from orbit_operator.settings import Settings
from orbit_runtime.spec import OrbitRun
from orbit_runtime.spec.placement import Egress, Toleration, halve, read_quantity
from orbit_runtime.workers.child.run_token import TOKEN_VARIABLE
from orbit_runtime.workers.servers.process import AGENT_VARIABLE

GOLDEN = Path(__file__).parent / "golden"
SETTINGS = Settings(namespace="orbit-system", scrape_namespaces=("monitoring",), runtime_image="orbit-runtime:1")

SMALL: dict[str, Any] = {
    "model": {"uri": "builtin://tiny-adder"},
    "data": {"prompts": [{"uri": "builtin://two-digit-addition"}]},
    "environment": {"rewards": [{"name": "correct", "type": "ExactMatch"}]},
    "training": {"steps": 10},
    "storage": {"uri": "s3://runs/team", "credentialsSecretName": "store"},
}
LARGE: dict[str, Any] = {
    **SMALL,
    "model": {"uri": "pvc://models/large"},
    "environment": {
        "code": {"uri": "configmap://my-rewards"},
        "rewards": [{"name": "mine", "entrypoint": "rewards:score"}],
    },
    "storage": {"uri": "s3://runs/team", "serviceAccountName": "orbit-runs"},
    "rollout": {"engine": "SGLang"},
    "placement": {
        "layout": "Split",
        "gpuProduct": "NVIDIA-B200",
        "image": "my-runtime:2",
        "resources": {"cpu": 65, "memory": "1Ti", "ephemeralStorage": "200Gi"},
        "modelCache": {"claimName": "model-cache"},
        "envFromSecrets": ["hub-token"],
        "egress": [{"cidr": "10.0.0.0/8", "ports": [9000]}, {"namespace": "proxy"}],
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "dedicated", "value": "rl", "effect": "NoSchedule"}],
    },
    "lifecycle": {"queueName": "team-queue", "terminationGracePeriodSeconds": 600},
}


def source(spec: dict[str, Any], name: str = "adder") -> RunSource:
    manifest = OrbitRun.model_validate(
        {"apiVersion": "orbitrl.dev/v1alpha1", "kind": "OrbitRun", "metadata": {"name": name}, "spec": spec}
    )
    return RunSource("team", name, "0f8b-uid", spec, manifest)


def objects(spec: dict[str, Any], avoid: tuple[str, ...] = ()) -> list[Object]:
    run = source(spec)
    return [
        build_config_map(run),
        build_network_policy(run, SETTINGS),
        build_job(run, 3, avoid, SETTINGS),
        build_cleanup_job(run, SETTINGS),
    ]


@pytest.mark.parametrize(("name", "spec", "avoid"), [("small", SMALL, ()), ("large", LARGE, ("n1", "n2"))])
def test_the_objects_of_a_run_are_these(name: str, spec: dict[str, Any], avoid: tuple[str, ...]) -> None:
    text = json.dumps(objects(spec, avoid), indent=1, sort_keys=True) + "\n"
    path = GOLDEN / f"{name}.json"
    if os.environ.get("ORBIT_TEST_WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("spec", [SMALL, LARGE])
def test_every_pod_is_restricted(spec: dict[str, Any]) -> None:
    for workload in (built for built in objects(spec) if built["kind"] == "Job"):
        pod = workload["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert all(
            set(volume) - {"name"} <= {"configMap", "emptyDir", "persistentVolumeClaim"} for volume in pod["volumes"]
        )
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            requests, limits = container["resources"]["requests"], container["resources"]["limits"]
            assert {**limits, "cpu": requests["cpu"]} == requests, "but for cores that nobody named"


def test_the_attempt_is_one_pod_and_one_try() -> None:
    job = build_job(source(SMALL), 12, (), SETTINGS)
    assert job["metadata"]["name"] == "adder-a12"
    wanted = {"backoffLimit": 0, "completions": 1, "parallelism": 1, "podReplacementPolicy": "Failed", "suspend": False}
    assert {name: job["spec"][name] for name in wanted} == wanted
    environment = {each["name"]: each["value"] for each in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert environment["ORBIT_ATTEMPT"] == "adder-a12"
    assert job["spec"]["template"]["metadata"]["labels"]["orbitrl.dev/attempt"] == "12"


def test_a_queued_job_is_held_until_its_queue_lets_it_go() -> None:
    job = build_job(source(LARGE), 1, (), SETTINGS)
    assert job["spec"]["suspend"] is True
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-queue"


POD: dict[str, Any] = {
    "labels": {"kueue.x-k8s.io/priority-class": "high", "cost-centre": "7"},
    "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
    "securityContext": {"runAsUser": 1000, "supplementalGroups": [2000]},
    "priorityClassName": "training-high",
    "runtimeClassName": "nvidia",
    "schedulerName": "volcano",
    "imagePullSecrets": [{"name": "team-registry"}],
    "env": [{"name": "NCCL_IB_HCA", "value": "mlx5"}, {"name": "HTTPS_PROXY", "value": "http://own"}],
    "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "1Ti"}}],
    "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
    "resources": {"limits": {"rdma/ib": 1}},
    "gpuResource": "nvidia.com/mig-3g.40gb",
}
"""What the installation or a manifest adds to pods."""


@pytest.mark.parametrize("by", ["manifest", "installation"])
@pytest.mark.parametrize("layout", ["Split", "Colocated"])
def test_a_run_has_what_its_cluster_asks_of_pods(by: str, layout: str) -> None:
    placement = {**LARGE["placement"], "layout": layout, **({"pod": POD} if by == "manifest" else {})}
    run = source({**LARGE, "placement": placement, "lifecycle": {}})
    run = replace(run, installed=POD) if by == "installation" else run
    settings = replace(SETTINGS, run_env={"HTTPS_PROXY": "http://installed"}, image_pull_secrets=("registry",))
    job = build_job(run, 1, ("n1",), settings)
    for made in (job, build_config_map(run), build_network_policy(run, settings), build_cleanup_job(run, settings)):
        assert POD["labels"].items() <= made["metadata"]["labels"].items(), "Kueue reads the Job's"
        assert made["metadata"]["labels"]["orbitrl.dev/run-name"] == "adder"
    template, pod = job["spec"]["template"], job["spec"]["template"]["spec"]
    assert template["metadata"]["annotations"] == POD["annotations"]
    assert pod["securityContext"]["runAsUser"] == 1000
    assert (pod["securityContext"]["fsGroup"], pod["securityContext"]["runAsNonRoot"]) == (65532, True)
    for name in ("priorityClassName", "runtimeClassName", "schedulerName", "topologySpreadConstraints"):
        assert pod[name] == POD[name]
    assert pod["imagePullSecrets"] == [{"name": "registry"}, {"name": "team-registry"}]
    assert set(pod["affinity"]) == {"nodeAffinity", "podAntiAffinity"}
    containers = [*pod["containers"], *pod.get("initContainers", [])]
    assert len(containers) == (2 if layout == "Split" else 1)
    for container in containers:
        variables = {each["name"]: each["value"] for each in container["env"]}
        assert (variables["NCCL_IB_HCA"], variables["HTTPS_PROXY"]) == ("mlx5", "http://own")
        assert len(variables) == len(container["env"])
        assert POD["volumeMounts"][0] in container["volumeMounts"]
        for amounts in container["resources"].values():
            assert amounts["rdma/ib"] == 1
            assert amounts["nvidia.com/mig-3g.40gb"] == ("4" if layout == "Split" else "8")
            assert "nvidia.com/gpu" not in amounts
    cleanup = build_cleanup_job(run, settings)["spec"]["template"]["spec"]
    assert {"name": "team-registry"} in cleanup["imagePullSecrets"]
    assert "priorityClassName" not in cleanup, "it preempts nothing that trains"
    assert "rdma/ib" not in cleanup["containers"][0]["resources"]["limits"]


def test_ranks_have_the_same_and_their_head_no_devices() -> None:
    run = source(
        {**LARGE, "placement": {**LARGE["placement"], "layout": "Colocated", "nodes": 2, "pod": POD}, "lifecycle": {}}
    )
    made = build_ray_cluster(run, 1, SETTINGS)["spec"]
    (workers,) = made["workerGroupSpecs"]
    (ranks,), (head,) = (each["template"]["spec"]["containers"] for each in (workers, made["headGroupSpec"]))
    assert ranks["resources"]["limits"]["rdma/ib"] == 1
    assert ranks["resources"]["limits"]["nvidia.com/mig-3g.40gb"] == "8"
    assert "rdma/ib" not in head["resources"]["limits"]
    for each in (workers, made["headGroupSpec"]):
        template = each["template"]
        assert (template["spec"]["runtimeClassName"], template["spec"]["schedulerName"]) == ("nvidia", "volcano")
        assert template["metadata"]["labels"]["cost-centre"] == "7"
        assert {"name": "team-registry"} in template["spec"]["imagePullSecrets"]


def test_gpus_may_come_by_claims_alone() -> None:
    claims = {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "eight-gpus"}],
              "resources": {"claims": [{"name": "gpus"}]}, "gpuResource": ""}  # fmt: skip
    run = source({**SMALL, "placement": {"pod": claims}})
    pod = build_job(run, 1, (), SETTINGS)["spec"]["template"]["spec"]
    assert pod["resourceClaims"] == claims["resourceClaims"]
    assert pod["containers"][0]["resources"]["claims"] == [{"name": "gpus"}]
    assert "nvidia.com/gpu" not in pod["containers"][0]["resources"].get("limits", {})
    body = {"metadata": {"name": "a", "namespace": "team", "uid": "u"}, "spec": {**LARGE, "lifecycle": {}}}
    assert "cannot divide" in judge_manifest(body, claims).invalid, "each container would see all of them"


def test_an_installations_queue_holds_runs_that_name_none() -> None:
    settings = replace(SETTINGS, run_queue="default-queue")
    job = build_job(source(SMALL), 1, (), settings)
    assert (job["spec"]["suspend"], job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]) == (True, "default-queue")
    assert build_job(source(LARGE), 1, (), settings)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-queue"
    assert (lifecycle_of({}, "default-queue").queue_name, lifecycle_of({}).queue_name) == ("default-queue", None)


def test_https_may_be_limited_to_networks_of_the_installation() -> None:
    policy = build_network_policy(source(SMALL), replace(SETTINGS, https_cidrs=("10.0.0.0/8",)))
    https = {"ports": [{"protocol": "TCP", "port": 443}], "to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}
    assert https in policy["spec"]["egress"]
    anywhere = [each for each in policy["spec"]["egress"] if "to" not in each]
    assert [port["port"] for each in anywhere for port in each["ports"]] == [53, 53, 5353, 5353], "names only"


def test_a_split_pod_shares_everything_by_halves() -> None:
    pod = build_job(source(LARGE), 1, (), SETTINGS)["spec"]["template"]["spec"]
    (engine,), (run,) = pod["initContainers"], pod["containers"]
    assert engine["restartPolicy"] == "Always"
    port = engine["args"][engine["args"].index("--port") + 1]
    assert {"name": AGENT_VARIABLE, "value": f"http://127.0.0.1:{port}"} in run["env"]
    assert (engine["command"], engine["args"][0]) == (["orbit"], "agent")
    assert {"name": TOKEN_VARIABLE, "value": "/run/orbit/token"} in run["env"]
    assert {"name": TOKEN_VARIABLE, "value": "/run/orbit/token"} in engine["env"]
    assert {"name": "token", "mountPath": "/run/orbit"} in engine["volumeMounts"]
    assert {"name": "token", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}} in pod["volumes"]
    shared = {"/tmp", "/dev/shm", "/var/cache/orbit", "/var/lib/orbit"}
    assert shared <= {each["mountPath"] for each in engine["volumeMounts"]}
    for container in (engine, run):
        limits = container["resources"]["limits"]
        assert (limits["nvidia.com/gpu"], limits["cpu"], limits["memory"]) == ("4", "32500m", "512Gi")


def test_a_trainer_on_one_gpu_leaves_the_others_to_the_engines_container() -> None:
    spec = {**LARGE, "placement": {**LARGE["placement"], "gpus": 8, "trainerGpus": 1}}
    pod = build_job(source(spec), 1, (), SETTINGS)["spec"]["template"]["spec"]
    (engine,), (run,) = pod["initContainers"], pod["containers"]
    found = [each["resources"]["limits"]["nvidia.com/gpu"] for each in (run, engine)]
    assert found == ["1", "7"]
    assert engine["resources"]["limits"]["memory"] == run["resources"]["limits"]["memory"]


@pytest.mark.parametrize(
    ("placement", "settings", "requested", "limit"),
    [
        ({"gpus": 8}, {}, "32000m", None),
        ({"gpus": 1}, {}, "4000m", None),
        ({"gpus": 0}, {}, "1000m", None),
        ({"gpus": 8, "layout": "Split"}, {}, "16000m", None),
        ({"gpus": 8}, {"run_cpu_per_gpu": 0.03}, "240m", None),
        ({"gpus": 8}, {"run_cpu_per_gpu": 0.0}, None, None),
        ({"gpus": 0}, {"run_cpu_per_gpu": 0.0}, None, None),
        ({"gpus": 2}, {"run_cpu": 16}, "16", "16"),
        ({"gpus": 8, "resources": {"cpu": 64}}, {"run_cpu": 16}, "64", "64"),
        ({"gpus": 8, "resources": {"cpu": 64}}, {}, "64", "64"),
    ],
)
def test_cores_that_are_named_are_a_limit_too_and_others_a_share_for_each_gpu(
    placement: Object, settings: dict[str, Any], requested: str | None, limit: str | None
) -> None:
    run = source({**SMALL, "placement": placement, "rollout": {"engine": "SGLang"}})
    pod = build_job(run, 1, (), replace(SETTINGS, **settings))["spec"]["template"]["spec"]
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        resources = container["resources"]
        assert (resources.get("requests", {}).get("cpu"), resources.get("limits", {}).get("cpu")) == (requested, limit)


ADDED = replace(
    SETTINGS,
    run_node_selector={"pool": "any", "zone": "a"},
    run_tolerations=(
        Toleration(key="dedicated", value="rl", effect="NoSchedule"),
        Toleration(key="spot", operator="Exists"),
    ),
    run_egress=(Egress(namespace="proxy"), Egress(cidr="169.254.170.23/32", ports=(80,))),
    run_priority_class="training",
    run_pod_labels={"team": "rl"},
    run_pod_annotations={"example.com/note": "1"},
)


def test_what_the_installation_says_is_added_to_what_the_manifest_says() -> None:
    template = build_job(source(LARGE), 1, (), ADDED)["spec"]["template"]
    pod, head = template["spec"], template["metadata"]
    assert pod["nodeSelector"] == {"pool": "gpu", "zone": "a"}, "the manifest's own value for a key holds"
    assert [each["key"] for each in pod["tolerations"]] == [
        "nvidia.com/gpu", "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable", "dedicated", "spot",
    ], "what both name is there once"  # fmt: skip
    assert pod["priorityClassName"] == "training"
    assert head["labels"] == {"team": "rl", **labels(source(LARGE), 1)}
    assert head["annotations"] == {"example.com/note": "1"}
    egress = build_network_policy(source(LARGE), ADDED)["spec"]["egress"]
    assert [each["to"] for each in egress[2:]] == [
        [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
        [{"namespaceSelector": {"matchExpressions": [
            {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["proxy"]}]}}],
        [{"ipBlock": {"cidr": "169.254.170.23/32"}}],
    ]  # fmt: skip
    bare = build_job(source(SMALL), 1, (), ADDED)["spec"]["template"]["spec"]
    assert bare["nodeSelector"] == {"pool": "any", "zone": "a"}


def test_the_cleanup_may_stand_where_its_run_may_and_pushes_nothing_away() -> None:
    run, cleanup = (build(source(LARGE)) for build in (
        lambda run: build_job(run, 1, ("n1",), ADDED), lambda run: build_cleanup_job(run, ADDED)
    ))  # fmt: skip
    of_run, of_cleanup = run["spec"]["template"], cleanup["spec"]["template"]
    for same in ("nodeSelector", "tolerations"):
        assert of_cleanup["spec"][same] == of_run["spec"][same]
    assert not {"affinity", "priorityClassName"} & set(of_cleanup["spec"])
    assert "nvidia.com/gpu" not in json.dumps(of_cleanup["spec"]["containers"])
    assert of_cleanup["metadata"]["annotations"] == of_run["metadata"]["annotations"]
    assert of_cleanup["metadata"]["labels"]["team"] == "rl"


def test_the_longest_name_fits_every_object() -> None:
    run = source(SMALL, "a" * 52)
    for built in (build_config_map(run), build_job(run, 9999, (), SETTINGS), build_cleanup_job(run, SETTINGS)):
        assert len(built["metadata"]["name"]) <= 63


def test_the_runs_own_manifest_is_the_same_for_every_attempt_and_can_be_loaded() -> None:
    suspended = {**LARGE, "lifecycle": {"suspend": True}}
    text = build_config_map(source(LARGE))["data"]["run.yaml"]
    assert text == build_config_map(source(suspended))["data"]["run.yaml"]
    loaded = OrbitRun.model_validate(json.loads(text), by_name=False)
    assert loaded.spec.model.uri == "file:///mnt/claims/models/large"
    assert loaded.spec.observability.metrics_port == 9400


def test_a_run_that_shows_nothing_opens_nothing() -> None:
    silent = {**SMALL, "observability": {"metricsPort": -1}}
    assert build_network_policy(source(silent), SETTINGS)["spec"]["ingress"] == []
    container = build_job(source(silent), 1, (), SETTINGS)["spec"]["template"]["spec"]["containers"][0]
    assert not {"ports", "readinessProbe"} & set(container)


def test_claims_and_config_maps_become_paths_and_read_only_mounts() -> None:
    spec = {"model": {"uri": "pvc://m/a/b"}, "data": {"prompts": [{"uri": "pvc://m/p.jsonl"}, {"uri": "s3://b/p"}]}}
    assert localise(spec)["data"]["prompts"] == [{"uri": "file:///mnt/claims/m/p.jsonl"}, {"uri": "s3://b/p"}]
    volumes, mounts = build_mounts(spec, SETTINGS)
    assert [volume["persistentVolumeClaim"]["claimName"] for volume in volumes] == ["m"]
    assert [(mount["mountPath"], mount["readOnly"]) for mount in mounts] == [("/mnt/claims/m", True)]


@pytest.mark.parametrize(
    ("whole", "half"), [("1Gi", "512Mi"), ("1Ti", "512Gi"), ("3G", "1500M"), ("2", "1"), ("1000", "500")]
)
def test_halving_a_quantity(whole: str, half: str) -> None:
    assert halve(whole) == half
    assert read_quantity(half) * 2 == read_quantity(whole)


@pytest.mark.parametrize("spec", [SMALL, LARGE])
def test_what_an_installation_asks_of_pods_is_in_every_pod(spec: dict[str, Any]) -> None:
    settings = replace(
        SETTINGS, run_env={"HTTPS_PROXY": "http://proxy:3128"}, run_ca_config_map="our-cas", run_as_user=-1
    )
    run = source(
        {**spec, "lifecycle": {}, "placement": {**spec.get("placement", {}), "layout": "Colocated", "nodes": 2}}
    )
    groups = build_ray_cluster(run, 1, settings)["spec"]
    templates = [
        each["spec"]["template"] for each in (build_job(run, 1, (), settings), build_cleanup_job(run, settings))
    ]
    templates += [groups["headGroupSpec"]["template"], groups["workerGroupSpecs"][0]["template"]]
    for template in templates:
        pod = template["spec"]
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & set(pod["securityContext"])
        assert {"name": "authorities", "configMap": {"name": "our-cas"}} in pod["volumes"]
        for container in pod["containers"]:
            variables = {each["name"]: each["value"] for each in container["env"]}
            assert variables["HTTPS_PROXY"] == "http://proxy:3128"
            assert variables["SSL_CERT_FILE"] == "/etc/orbit-ca/ca.crt"
    (engine,) = build_job(source(LARGE), 1, (), settings)["spec"]["template"]["spec"]["initContainers"]
    assert {"HTTPS_PROXY", "SSL_CERT_FILE"} <= {each["name"] for each in engine["env"]}
