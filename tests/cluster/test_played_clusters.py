"""Clusters that cannot run here, played by a real API server with what makes each of them different.

Each test says what it stands for, and what of it is played.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.bed.control_plane import ControlPlane
from cluster.bed.programs import find_program
from cluster.by_hand import ROOT, Object, Server, Team, connect, open_team, wait_for
from cluster.operator_process import run_operator
from fakes.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

ADMISSION = "/apis/admissionregistration.k8s.io/v1"
PLURALS = {
    "ServiceAccount": ("/api/v1", "serviceaccounts"),
    "Service": ("/api/v1", "services"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets"),
    "Role": ("/apis/rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": ("/apis/rbac.authorization.k8s.io/v1", "rolebindings"),
    "Deployment": ("/apis/apps/v1", "deployments"),
}
ARGO_EXCLUDES = {
    "Endpoints", "EndpointSlice", "Lease", "SelfSubjectReview", "TokenReview", "LocalSubjectAccessReview",
    "SelfSubjectAccessReview", "SelfSubjectRulesReview", "SubjectAccessReview", "CertificateSigningRequest",
    "CertificateRequest", "CiliumIdentity", "CiliumEndpoint", "CiliumEndpointSlice", "PolicyReport",
    "ClusterPolicyReport", "EphemeralReport", "ClusterEphemeralReport", "AdmissionReport", "ClusterAdmissionReport",
    "BackgroundScanReport", "ClusterBackgroundScanReport", "UpdateRequest",
}  # fmt: skip
"""Kinds that Argo CD 3 leaves out by default (`resource.exclusions`); before, Lease was left out without asking."""
ARGO_ORDER = ("NetworkPolicy", "PodDisruptionBudget", "ServiceAccount", "Role", "RoleBinding", "Service", "Deployment")
"""Order in which Argo CD applies kinds within one wave."""


@pytest.fixture
def server(control_plane: ControlPlane) -> Server:
    return connect(control_plane.kubeconfig)


def render(namespace: str, *values: str) -> list[Object]:
    """The chart without its tests, as `helm template` prints it; the CRD and what is cluster-wide is there already."""
    settings = ("crds.install=false", "rbac.nodes=false", "rbac.aggregate=false", "tests.enabled=false", *values)
    command = [find_program("helm4"), "template", "orbit", str(ROOT / "charts/orbit"), "--namespace", namespace,
               "--kube-version", "1.34.1", "--set", ",".join(settings)]  # fmt: skip
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [each for each in yaml.safe_load_all(text) if each is not None]


def apply(server: Server, team: Team, made: Object) -> None:
    prefix, plural = PLURALS[made["kind"]]
    server.apply(f"{prefix}/namespaces/{team.namespace}/{plural}/{made['metadata']['name']}", made)


@contextmanager
def policy(server: Server, name: str, spec: Object, binding: Object) -> Iterator[None]:
    """A ValidatingAdmissionPolicy with its binding, until the end."""
    places = [f"{ADMISSION}/{plural}/{name}" for plural in
              ("validatingadmissionpolicies", "validatingadmissionpolicybindings")]  # fmt: skip
    head = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": name}}
    server.apply(places[0], {**head, "kind": "ValidatingAdmissionPolicy", "spec": spec})
    server.apply(
        places[1], {**head, "kind": "ValidatingAdmissionPolicyBinding", "spec": {"policyName": name, **binding}}
    )
    try:
        yield
    finally:
        for place in reversed(places):
            server.delete(place)


def wait_refused(server: Server, path: str, body: Object) -> str:
    """What the API server says once it refuses the object: a new policy counts after a moment."""

    def refused() -> str:
        try:
            server.create(f"{path}?dryRun=All", body)
        except AssertionError as error:
            return str(error)
        return ""

    return wait_for(refused, "the policy stands")


def in_namespace(namespace: str) -> Object:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}


def test_argo_cd_leaves_out_the_lease_and_the_operator_makes_it_with_the_charts_own_rights(
    server: Server, tmp_path: Path
) -> None:
    """Stands for an installation by Argo CD: its default exclusions and its order are data here, nothing of it runs."""
    with open_team(server, "argo") as team:
        made = [each for each in render(team.namespace) if each["kind"] not in ARGO_EXCLUDES]
        assert {each["kind"] for each in made} == set(ARGO_ORDER), "each kind has its place in the order"
        for each in sorted(made, key=lambda each: ARGO_ORDER.index(each["kind"])):
            apply(server, team, each)
        (deployment,) = [each for each in made if each["kind"] == "Deployment"]
        account = deployment["spec"]["template"]["spec"]["serviceAccountName"]
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        settings = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        token = server.create(team.path("serviceaccounts", account, "token"), {"spec": {"expirationSeconds": 3600}})
        config = yaml.safe_load(Path(server.kubeconfig).read_text(encoding="utf-8"))
        config["users"][0]["user"] = {"token": token["status"]["token"]}
        (file := tmp_path / "kubeconfig").write_text(yaml.safe_dump(config), encoding="utf-8")
        settings |= {f"ORBIT_OPERATOR_{port}_PORT": "0" for port in ("METRICS", "HEALTH")}
        with run_operator(team, tmp_path / "operator.log", **settings, KUBECONFIG=str(file)) as operator:
            team.start_run("adder")
            try:
                team.wait_phase("adder", "Starting", "Running")
            except AssertionError as error:
                raise AssertionError(f"{error}; {operator.text[-3000:]}") from None
        leases = server.items(f"/apis/coordination.k8s.io/v1/namespaces/{team.namespace}/leases")
        assert {each["metadata"]["name"] for each in leases} == {"orbit-operator", "orbit-runs"}


UIDS = (1000700000, 1000710000)
SCC: Object = {
    "failurePolicy": "Fail",
    "matchConstraints": {
        "resourceRules": [{"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}]
    },
    "variables": [
        {"name": "pod", "expression": "has(object.spec.securityContext) ? object.spec.securityContext : {}"},
    ],
    "validations": [
        {
            "expression": " && ".join(
                f"(!has({field}) || ({field} >= {UIDS[0]} && {field} < {UIDS[1]}))"
                for field in ("variables.pod.runAsUser", "variables.pod.fsGroup")
            ),
            "message": f"unable to validate against any security context constraint: must be in the ranges: {UIDS}",
        }
    ],
}
"""`restricted-v2` of OpenShift, as far as users and groups go: they are the namespace's, or are left out."""


def test_on_openshift_a_run_takes_the_namespaces_user_and_a_fixed_one_is_refused_in_the_clusters_words(
    server: Server, tmp_path: Path
) -> None:
    """Stands for OpenShift's SCC restricted-v2: a policy refuses what it refuses; what it fills in is not played."""
    with (
        open_team(server, "openshift") as team,
        policy(server, team.namespace, SCC,
               {"validationActions": ["Deny"], "matchResources": in_namespace(team.namespace)}),
    ):  # fmt: skip
        probe = {"securityContext": {"runAsUser": 65532}, "containers": [{"name": "c", "image": "x"}]}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe"}, "spec": probe}
        assert "security context constraint" in wait_refused(server, team.path("pods"), body)
        with run_operator(team, tmp_path / "fixed.log"):
            team.start_run("fixed")
            said = wait_for(
                lambda: (found := team.status("fixed")).get("reason") == "PodRefused" and found,
                "the pod is refused",
                60,
            )
            assert (said["whoActs"], "security context constraint" in said["message"]) == ("Cluster", True)
        with run_operator(team, tmp_path / "left.log", ORBIT_OPERATOR_RUN_AS_USER="-1"):
            team.start_run("left")
            team.start_run("named", placement={"pod": {"securityContext": {"runAsUser": UIDS[0] + 1}}})
            for name in ("left", "named"):
                team.wait_phase(name, "Starting", "Running")
            users = {
                pod["metadata"]["labels"]["orbitrl.dev/run-name"]: pod["spec"]["securityContext"].get("runAsUser")
                for pod in team.pods()
            }
            assert (users["left"], users["named"]) == (None, UIDS[0] + 1)


def test_on_gke_the_operator_needs_no_quota_for_a_critical_priority_class(server: Server) -> None:
    """Stands for GKE, which takes pods of `system-cluster-critical` only where a quota of that scope has room: here the
    quota has none, as in a namespace without one there."""
    with open_team(server, "gke") as team:
        scope = {"operator": "In", "scopeName": "PriorityClass", "values": ["system-cluster-critical"]}
        quota = team.path("resourcequotas", "critical")
        spec = {"hard": {"pods": "0"}, "scopeSelector": {"matchExpressions": [scope]}}
        server.apply(
            quota, {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "critical"}, "spec": spec}
        )
        wait_for(lambda: (server.get(quota) or {}).get("status", {}).get("hard"), "the quota counts")
        find = {"labelSelector": "app.kubernetes.io/component=operator"}
        for values in (("priorityClassName=system-cluster-critical", "fullnameOverride=critical"), ()):
            for each in render(team.namespace, *values):
                if each["kind"] in ("ServiceAccount", "Deployment"):
                    apply(server, team, each)
        (pod,) = wait_for(lambda: server.items(team.path("pods"), **find), "the default's pod is made")
        assert not pod["spec"].get("priorityClassName")
        wait_for(
            lambda: any("exceeded quota" in each["message"] for each in server.items(team.path("events"))),
            "the other's is not",
        )


def test_dns_behind_the_service_is_reached_where_the_network_looks_there(server: Server, tmp_path: Path) -> None:
    """Stands for OpenShift with OVN-Kubernetes, which holds a packet against policies after the Service has replaced
    its port: CoreDNS listens on 5353. The network is played: the policies are read as it reads them."""
    with open_team(server, "dns") as team:
        ports = [{"name": name, "protocol": protocol, "port": 53, "targetPort": 5353}
                 for name, protocol in (("dns", "UDP"), ("dns-tcp", "TCP"))]  # fmt: skip
        service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "dns-default"}, "spec": {"ports": ports}}
        server.create(team.path("services"), service)
        made = server.get(team.path("services", "dns-default")) or {}
        behind = {(each["protocol"], each["targetPort"]) for each in made["spec"]["ports"]}
        for name, settings, is_reached in (("both", {}, True), ("plain", {"ORBIT_OPERATOR_DNS_PORTS": "53"}, False)):
            with run_operator(team, tmp_path / f"{name}.log", **settings):
                team.start_run(name)
                team.wait_phase(name, "Starting", "Running")
            path = f"/apis/networking.k8s.io/v1/namespaces/{team.namespace}/networkpolicies/{name}"
            found = server.get(path) or {}
            anywhere = [rule for rule in found["spec"]["egress"] if "to" not in rule]
            allowed = {(port["protocol"], port["port"]) for rule in anywhere for port in rule["ports"]}
            assert (behind <= allowed) is is_reached


DEVICES = "/apis/resource.k8s.io/v1"
DRIVER, SCHEDULER = "gpu.example.com", "real"


@contextmanager
def schedule(plane: ControlPlane, folder: Path) -> Iterator[None]:
    """The real scheduler, for pods that name it."""
    config = {
        "apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": str(plane.kubeconfig)}, "leaderElection": {"leaderElect": False},
        "profiles": [{"schedulerName": SCHEDULER}],
    }  # fmt: skip
    (file := folder / "scheduler.yaml").write_text(yaml.safe_dump(config))
    flags = {"config": file, "bind-address": "127.0.0.1", "secure-port": free_port()}
    plane.processes.start("kube-scheduler", find_program("kube-scheduler"), flags)
    try:
        yield
    finally:
        plane.processes.stop("kube-scheduler")


def serve_devices(server: Server, team: Team, node: str, count: int) -> str:
    """What a driver of devices announces on a node, and a template of claims that take all of it; returns its name."""
    devices = [{"name": f"gpu-{index}", "attributes": {"model": {"string": "B200"}}} for index in range(count)]
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    mine = {"cel": {"expression": f"device.driver == '{DRIVER}'"}}
    asked = {"name": "gpus", "exactly": {"deviceClassName": team.namespace, "count": count}}
    announced = {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": devices}
    for path, kind, name, spec in (
        ("deviceclasses", "DeviceClass", team.namespace, {"selectors": [mine]}),
        ("resourceslices", "ResourceSlice", node, announced),
        (f"namespaces/{team.namespace}/resourceclaimtemplates", "ResourceClaimTemplate", "all",
         {"spec": {"devices": {"requests": [asked]}}}),
    ):  # fmt: skip
        made = {"apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
        server.create(f"{DEVICES}/{path}", made)
    return "all"


def test_gpus_by_claims_are_found_where_a_driver_announces_them_and_a_run_waits_until_they_are_free(
    server: Server, control_plane: ControlPlane, tmp_path: Path
) -> None:
    """Stands for GPUs by dynamic resource allocation, up to scheduling: the scheduler and the claims' controller are
    real, the driver's ResourceSlice is made by hand, and nothing prepares a device."""
    with open_team(server, "claims") as team, run_operator(team, tmp_path / "operator.log"), ExitStack() as ending:
        room = {"cpu": "64", "memory": "512Gi", "pods": "110"}
        for index in (0, 1):
            status = {"capacity": room, "allocatable": room}
            server.merge(f"/api/v1/nodes/{team.namespace}-n{index}/status", {"status": status})
        node = f"{team.namespace}-n1"
        claim = {"name": "gpus", "resourceClaimTemplateName": serve_devices(server, team, node, 8)}
        for path in (f"deviceclasses/{team.namespace}", f"resourceslices/{node}"):
            ending.callback(server.delete, f"{DEVICES}/{path}")
        pod = {"schedulerName": SCHEDULER, "gpuResource": "", "resourceClaims": [claim],
               "resources": {"claims": [{"name": "gpus"}]}}  # fmt: skip

        def wait_unscheduled(name: str, words: str) -> None:
            def probe() -> bool:
                status = team.status(name)
                return status.get("reason") == "Unschedulable" and words in status["message"]

            wait_for(probe, f"{name}: {words}")
            assert (team.status(name)["phase"], team.status(name)["whoActs"]) == ("Pending", "Cluster")

        team.start_run("first", placement={"gpus": 8, "pod": pod})
        wait_unscheduled("first", "no scheduler has looked at the pod")
        ending.enter_context(schedule(control_plane, tmp_path))
        wait_for(lambda: team.status("first").get("node") == node, "it is where the devices are")
        (found,) = server.items(f"{DEVICES}/namespaces/{team.namespace}/resourceclaims")
        taken = found["status"]["allocation"]["devices"]["results"]
        assert {(each["driver"], each["pool"]) for each in taken} == {(DRIVER, node)}
        assert len(taken) == 8

        team.start_run("second", placement={"gpus": 8, "pod": pod})
        wait_unscheduled("second", "cannot allocate all claims")
        team.exits = {1: 0}
        team.wait_phase("first", "Succeeded")
        assert team.wait_phase("second", "Succeeded")["attempts"][0]["node"] == node


FENCES = (
    ("fences.maxGPUs=8", {"gpus": 8, "nodes": 2, "modelCache": {"claimName": "a"}}, "at most 8 GPUs"),
    (
        "fences.maxGPUs=8",
        {"pod": {"resources": {"limits": {"nvidia.com/mig-1g.5gb": 9}}}},
        "the installation's to name",
    ),
    ("fences.images={images.example.com/}", {"image": "elsewhere/orbit:1"}, "images that begin with"),
    ("fences.secrets={store}", {"envFromSecrets": ["store", "other"]}, "allowed Secrets"),
    ("fences.secrets={store}", {"pod": {"imagePullSecrets": [{"name": "other"}]}}, "allowed Secrets"),
    (
        "fences.secrets={store}",
        {"pod": {"volumes": [{"name": "a", "secret": {"secretName": "other"}}]}},
        "allowed Secrets",
    ),
    ("fences.forbidEgress=true", {"egress": [{"cidr": "0.0.0.0/0"}]}, "spec.placement.egress"),
)


@pytest.mark.parametrize(("value", "placement", "said"), FENCES, ids=lambda value: str(value)[:40])
def test_a_fence_refuses_what_a_tenant_may_not_ask_for_and_lets_all_else_through(
    server: Server, value: str, placement: dict[str, Any], said: str
) -> None:
    with open_team(server, "fenced") as team:
        objects = {each["kind"]: each.get("spec") or {} for each in render(team.namespace, value)}
        binding = objects["ValidatingAdmissionPolicyBinding"]
        binding.pop("policyName")
        with policy(server, team.namespace, objects["ValidatingAdmissionPolicy"], binding):
            over = team.build_run("over", placement={"gpus": 0, **placement})
            assert said in wait_refused(server, team.path("orbitruns"), over)
            team.start_run("within", placement={"gpus": 8, "image": "images.example.com/orbit:1",
                                                "envFromSecrets": ["store"]})  # fmt: skip
