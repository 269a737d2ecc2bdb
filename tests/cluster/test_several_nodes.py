"""A run over several nodes: what KubeRay's own CRD takes of its RayCluster, on a real API server.

Where KubeRay's operator was built (`tools/cluster_programs.sh kuberay`, some minutes) it runs too, and makes the pods.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.bed.control_plane import ControlPlane
from cluster.by_hand import Server, Team, connect, open_team, wait_for
from cluster.kuberay import CRDS, clusters, find_operator, install_crd, make_pods, run_kuberay
from cluster.operator_process import check_out, run_earlier_operator, run_operator

from orbit_runtime.spec.crd import build_crd
from orbit_runtime.spec.document import parse_document

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

EARLIER = "5d21b7e0"
"""A commit whose operator creates a run's pod beside its ranks, and does not claim namespaces."""
PLACEMENT = {"gpus": 0, "nodes": 3, "modelCache": {"claimName": "models"}}


@pytest.fixture
def server(control_plane: ControlPlane) -> Server:
    return connect(control_plane.kubeconfig)


@pytest.fixture
def kuberay_crd(server: Server) -> Iterator[None]:
    with install_crd(server):
        yield


def make_ranks(server: Server, team: Team, name: str, *, few: bool = False) -> dict[str, Any]:
    """KubeRay's part for one RayCluster; `few`: all pods but the last. Returns the cluster."""
    named = wait_for(lambda: [each for each in clusters(server, team) if each["metadata"]["name"] == name], name, 120)
    make_pods(team, named[0], few=few)
    return named[0]


def test_without_kuberay_the_run_waits_and_says_for_what_and_with_it_goes_on(
    server: Server, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with open_team(server, "nodes") as team, run_operator(team, tmp_path / "operator.log"):
        team.start_run("waits", placement=PLACEMENT)
        said = wait_for(
            lambda: (found := team.status("waits")).get("reason") == "RanksUnavailable" and found, "it says so"
        )
        assert (said["phase"], said["whoActs"]) == ("Pending", "Cluster")
        assert "install KubeRay" in said["message"]
        assert team.jobs() == []
        request.getfixturevalue("kuberay_crd")
        make_ranks(server, team, "ranks-waits-a1", few=True)
        wait_for(lambda: team.status("waits").get("reason") == "RanksPending", "its ranks have a RayCluster")
        time.sleep(3)
        assert team.jobs() == [], "no GPU is taken before the last rank has its node"
        make_ranks(server, team, "ranks-waits-a1")
        team.wait_phase("waits", "Starting", "Running", seconds=120)


@pytest.mark.usefixtures("kuberay_crd")
def test_each_attempt_has_a_ray_cluster_and_a_finished_one_none(server: Server, tmp_path: Path) -> None:
    with open_team(server, "nodes") as team, run_operator(team, tmp_path / "operator.log"):
        team.start_run("large", placement=PLACEMENT)
        first = make_ranks(server, team, "ranks-large-a1")
        team.wait_phase("large", "Starting", "Running")
        assert first["metadata"]["name"] == "ranks-large-a1"
        (group,) = first["spec"]["workerGroupSpecs"]
        assert group["replicas"] == 2
        (pod,) = [each for each in team.pods() if "orbitrl.dev/attempt" in each["metadata"]["labels"]]
        (run,) = pod["spec"]["containers"]
        assert {"name": "RAY_ADDRESS", "value": "ranks-large-a1-head-svc:6379"} in run["env"]
        policy = server.get(f"/apis/networking.k8s.io/v1/namespaces/{team.namespace}/networkpolicies/large")
        assert policy is not None
        assert any("podSelector" in str(each) for each in policy["spec"]["ingress"])

        team.exits = {1: 81}  # Its ranks were lost.
        second = make_ranks(server, team, "ranks-large-a2")
        assert [each["metadata"]["name"] for each in clusters(server, team)] == ["ranks-large-a2"]
        team.exits = {1: 81, 2: 0}
        team.wait_phase("large", "Succeeded")
        wait_for(lambda: not clusters(server, team), "nobody uses its nodes any more")
        assert second["metadata"]["ownerReferences"][0]["kind"] == "OrbitRun"


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("kuberay_crd")
def test_an_earlier_operator_is_upgraded_while_runs_on_one_node_and_on_several_go_on(
    server: Server, tmp_path: Path
) -> None:
    """As `helm upgrade` does it: the CRD of this version first, then this operator instead of the other."""
    tree = check_out(EARLIER, tmp_path / "earlier")
    if tree is None:
        pytest.skip(f"this checkout does not have commit {EARLIER}, whose operator is upgraded here")
    texts = [tree / "crds" / "orbitruns.orbitrl.dev.yaml", tree / "examples" / "quickstart.yaml"]
    earlier, manifest = (parse_document(text.read_text(encoding="utf-8"), text.name).value for text in texts)
    crd = f"{CRDS}/orbitruns.orbitrl.dev"
    try:
        server.apply(crd, earlier)
        published = "/openapi/v3/apis/orbitrl.dev/v1alpha1"
        wait_for(lambda: "waitingDeadlineSeconds" not in str(server.get(published)), "the earlier CRD is served")
        with open_team(server, "upgrade") as team:
            with run_earlier_operator(team, tmp_path / "earlier.log", tree):
                for name, placement in (("small", {"gpus": 0}), ("large", PLACEMENT)):
                    spec = {**manifest["spec"], "storage": {"uri": "s3://runs"}, "placement": placement}
                    server.create(team.path("orbitruns"), {**manifest, "metadata": {"name": name}, "spec": spec})
                make_ranks(server, team, "ranks-large-a1")
                before = {name: team.wait_phase(name, "Starting", "Running") for name in ("small", "large")}
                wait_for(lambda: [pod["status"]["phase"] for pod in team.pods()] == ["Running"] * 5, "all pods run")
            pods = {pod["metadata"]["uid"] for pod in team.pods()}
            server.apply(crd, build_crd())
            with run_operator(team, tmp_path / "operator.log"):
                for name in before:
                    team.edit_run(name, lifecycle={"ttlSecondsAfterFinished": 86400})
                    wait_for(lambda name=name: team.status(name)["observedGeneration"] == 2, "this operator has looked")
                    assert [each["podUID"] for each in team.status(name)["attempts"]] == [
                        each["podUID"] for each in before[name]["attempts"]
                    ]
                time.sleep(3)
                assert {pod["metadata"]["uid"] for pod in team.pods()} == pods
                assert [each["metadata"]["name"] for each in clusters(server, team)] == ["ranks-large-a1"]

                team.edit_run("small", lifecycle={"suspend": True})
                team.wait_phase("small", "Suspended")
                team.exits = {1: 81, 2: 0}
                team.edit_run("small", lifecycle={"suspend": False})
                make_ranks(server, team, "ranks-large-a2")
                for name, free, infra in (("small", 1, 0), ("large", 0, 1)):
                    status = team.wait_phase(name, "Succeeded")
                    assert (status["freeRestarts"], status["infraRestarts"]) == (free, infra)
                    assert status["attempts"][0]["podUID"] in pods
    finally:
        server.apply(crd, build_crd())


@pytest.fixture
def kuberay(kuberay_crd: None, control_plane: ControlPlane, tmp_path: Path) -> Iterator[Path]:
    """KubeRay's operator; its log."""
    if (program := find_operator()) is None:
        pytest.skip("KubeRay's operator was not built: tools/cluster_programs.sh kuberay")
    with run_kuberay(program, str(control_plane.kubeconfig), log := tmp_path / "kuberay.log"):
        yield log


def test_kuberays_operator_makes_the_pods_that_were_asked_for(server: Server, kuberay: Path, tmp_path: Path) -> None:
    with open_team(server, "nodes") as team, run_operator(team, tmp_path / "operator.log"):
        team.start_run("real", placement=PLACEMENT)
        team.wait_phase("real", "Starting", "Running")

        def ranks() -> list[dict[str, Any]]:
            return [each for each in team.pods() if each["metadata"]["labels"].get("ray.io/cluster") == "ranks-real-a1"]

        try:
            wait_for(lambda: len(ranks()) == 3, "a head and two nodes", 120)
        except AssertionError as error:
            raise AssertionError(f"{error}: {kuberay.read_text()[-3000:]}") from None
        kinds = sorted(each["metadata"]["labels"]["ray.io/node-type"] for each in ranks())
        assert kinds == ["head", "worker", "worker"]
        for each in ranks():
            (container,) = each["spec"]["containers"]
            assert "ray start" in " ".join(container.get("args") or container["command"])
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["livenessProbe"]["tcpSocket"]["port"] in (6379, 9500), "KubeRay's own needs wget"
            assert each["metadata"]["labels"]["orbitrl.dev/run-name"] == "real"
        service = server.get(team.path("services", "ranks-real-a1-head-svc"))
        assert service is not None, "where RAY_ADDRESS leads"
        assert 6379 in [port["port"] for port in service["spec"]["ports"]]
        team.exits = {1: 0}
        team.wait_phase("real", "Succeeded")
        wait_for(lambda: not ranks(), "its pods are gone", 120)
