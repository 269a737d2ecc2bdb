"""What can happen between the operator and its API server: lost watches, old versions, another CRD than its own.

The operator is a process; API server and controllers are real, pods are moved by hand.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster.bed.control_plane import ControlPlane
from cluster.by_hand import RUNS, Server, connect, open_team, wait_for
from cluster.operator_process import run_operator
from cluster.wire import open_wire
from fakes.ports import free_port

from orbit_operator.crd_check import find_differences, find_served, missing_fields
from orbit_operator.handlers import SILENT_SECONDS
from orbit_runtime.spec.crd import build_crd, build_schema

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/orbitruns.orbitrl.dev"
PATIENT = {"ORBIT_OPERATOR_RESYNC_SECONDS": "300"}
"""No second look at runs: what is found out comes from watching."""


@pytest.fixture(scope="module")
def server(control_plane: ControlPlane) -> Server:
    return connect(control_plane.kubeconfig)


def is_too_old(plane: ControlPlane, path: str, version: str) -> bool:
    """Whether whoever watched until that version must list anew (410)."""
    query = {"watch": "1", "resourceVersion": version, "timeoutSeconds": "1"}
    with plane.client() as client:
        answer = client.get(path, params=query)
    return answer.status_code == 410 or '"code":410' in answer.text


def test_watches_that_are_dropped_lose_nothing(server: Server, tmp_path: Path) -> None:
    config = tmp_path / "kubeconfig"
    with (
        open_team(server, "dropped") as team,
        open_wire(server.kubeconfig, config) as wire,
        run_operator(team, tmp_path / "operator.log", KUBECONFIG=str(config), **PATIENT),
    ):
        team.exits = {1: 0}
        dropped = 0
        for number in range(6):
            team.start_run(f"adder-{number}")
            dropped += wire.drop()
            team.wait_phase(f"adder-{number}", "Starting", "Running", "Succeeded", seconds=30)
            dropped += wire.drop()
        for number in range(6):
            team.wait_phase(f"adder-{number}", "Succeeded", seconds=60)
        assert dropped > 12
        assert team.jobs() == [f"adder-{number}-a1" for number in range(6)]


def test_watches_that_fall_silent_are_made_anew(server: Server, tmp_path: Path) -> None:
    """Their connections stand, and nothing comes: a firewall that forgot them. Bookmarks come once a minute."""
    assert SILENT_SECONDS > 60
    config = tmp_path / "kubeconfig"
    patient = {**PATIENT, "ORBIT_TEST_SILENT_SECONDS": "3"}
    with (
        open_team(server, "silent") as team,
        open_wire(server.kubeconfig, config) as wire,
        run_operator(team, tmp_path / "operator.log", KUBECONFIG=str(config), **patient) as operator,
    ):
        team.start_run("adder")
        team.wait_phase("adder", "Starting")
        assert wire.hush() >= 3
        team.start_run("unheard")
        team.exits = {1: 0}
        team.wait_phase("unheard", "Succeeded", seconds=60)
        team.wait_phase("adder", "Succeeded", seconds=60)
        assert team.jobs() == ["adder-a1", "unheard-a1"]
        assert operator.process.poll() is None


def test_versions_that_the_api_server_no_longer_has_are_listed_anew(
    server: Server, control_plane: ControlPlane, tmp_path: Path
) -> None:
    """410: the operator was away for so long, and the API server started anew meanwhile."""
    config = tmp_path / "kubeconfig"
    with (
        open_team(server, "old") as team,
        open_wire(server.kubeconfig, config) as wire,
        run_operator(team, tmp_path / "operator.log", KUBECONFIG=str(config), **PATIENT) as operator,
    ):
        for name in ("ends", "goes", "stays"):
            team.start_run(name)
            team.wait_phase(name, "Starting", "Running")
        found = server.get(team.path("orbitruns"))
        assert found is not None
        version = found["metadata"]["resourceVersion"]
        wire.cut()
        # Else the new server might know the version as its oldest.
        server.delete(team.path("orbitruns", "goes"))
        control_plane.stop_api_server()
        control_plane.start_api_server()
        wait_for(lambda: _answers(server), "the API server answers")
        team.exits = {2: 0}
        (pod,) = [each for each in team.pods() if each["metadata"]["name"].startswith("ends-a1")]
        team.end(pod, 0)
        team.start_run("comes")
        wait_for(lambda: is_too_old(control_plane, team.path("orbitruns"), version), "410")
        wire.mend()
        assert team.wait_phase("ends", "Succeeded")["attempt"] == 1
        assert team.wait_phase("comes", "Starting", "Running")["attempt"] == 1
        team.edit_run("stays", lifecycle={"suspend": True})
        team.wait_phase("stays", "Suspended")
        wait_for(lambda: "goes-a1" not in team.jobs(), "what was deleted is gone")
        assert operator.process.poll() is None, operator.text[-2000:]


def _answers(server: Server) -> bool:
    try:
        return server.get(RUNS) is not None
    except (AssertionError, httpx.HTTPError):
        return False


def test_with_a_crd_that_is_older_runs_go_on_and_everybody_is_told(server: Server, tmp_path: Path) -> None:
    """It lacks a field of the spec and two of the status, one of them in a list; a bound, a value and a rule differ."""
    older = build_crd()
    schema = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    del schema["spec"]["properties"]["storage"]["properties"]["deletionPolicy"]
    del schema["spec"]["properties"]["storage"]["default"]["deletionPolicy"]
    placement = schema["spec"]["properties"]["placement"]["properties"]
    placement["gpus"]["maximum"] = 8
    placement["layout"]["enum"].remove("Split")
    placement["tolerations"]["items"]["x-kubernetes-validations"].pop()
    del schema["status"]["properties"]["whoActs"]
    del schema["status"]["properties"]["attempts"]["items"]["properties"]["ending"]["properties"]["whoActs"]
    health, metrics = free_port(), free_port()
    ports = {"ORBIT_OPERATOR_HEALTH_PORT": str(health), "ORBIT_OPERATOR_METRICS_PORT": str(metrics)}
    server.delete(CRD)
    wait_for(lambda: server.get(CRD) is None, "this version's CRD goes")
    try:
        server.create(CRD.rpartition("/")[0], older)
        wait_for(lambda: server.get(RUNS), "the older one is served")
        with open_team(server, "older") as team, run_operator(team, tmp_path / "operator.log", **ports) as operator:
            team.exits = {1: 82, 2: 0}
            team.start_run("adder")
            status = team.wait_phase("adder", "Succeeded")
            assert [each["ending"]["reason"] for each in status["attempts"]] == ["EngineDied", "Succeeded"]
            assert "whoActs" not in status
            ready = httpx.get(f"http://127.0.0.1:{health}/readyz", trust_env=False)
            assert ready.status_code == 200
            assert ready.json()["note"] == (
                "the installed CRD is older than the operator: it lacks spec.storage.deletionPolicy, it lacks "
                "status.whoActs, it lacks status.attempts[].ending.whoActs, it knows no Split for "
                "spec.placement.layout, it has another maximum for spec.placement.gpus …; apply crds/ of this version"
            )
            told = httpx.get(f"http://127.0.0.1:{metrics}/metrics", trust_env=False).text
            assert "orbit_operator_crd_outdated 1.0" in told
            assert "the installed CRD is older" in operator.text
    finally:
        server.apply(CRD, build_crd())
        wait_for(lambda: "deletionPolicy" in json.dumps(server.get(CRD)), "this version's CRD")


def test_the_api_server_publishes_the_schema_as_it_was_written(server: Server) -> None:
    """What the operator compares its own with: in its own CRD it finds no difference."""

    def compare() -> tuple[list[str], list[str]] | None:
        document = server.get("/openapi/v3/apis/orbitrl.dev/v1alpha1")
        served = None if document is None else find_served(document)
        return served and (missing_fields(build_schema(), served), find_differences(build_schema(), served))

    # Another test's CRD may be published for some moments more.
    wait_for(lambda: compare() == ([], []), "no difference", 20)


WORKLOADS = "workloads.kueue.x-k8s.io"


def serve_workloads(server: Server, version: str) -> str:
    """Kueue's CRD, which has two versions, serves this one alone; returns the path of its API."""
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    versions = [
        {"name": each, "served": each == version, "storage": each == "v1beta2", "schema": schema}
        for each in ("v1beta1", "v1beta2")
    ]
    # The API server wants to know who approved of a name in this group: Kueue's own manifest says so too.
    approved = {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/kueue/pull/1"}
    crd = {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": WORKLOADS, "annotations": approved},
        "spec": {
            "group": "kueue.x-k8s.io", "scope": "Namespaced", "versions": versions,
            "names": {"kind": "Workload", "plural": "workloads", "singular": "workload", "listKind": "WorkloadList"},
        },
    }  # fmt: skip
    server.apply(CRD.replace("orbitruns.orbitrl.dev", WORKLOADS), crd)
    other = "v1beta1" if version == "v1beta2" else "v1beta2"
    path = "/apis/kueue.x-k8s.io/{}/workloads"
    wait_for(lambda: server.get(path.format(version)), f"Workloads of {version} are served")
    wait_for(lambda: server.get(path.format(other)) is None, f"those of {other} are not")
    return f"/apis/kueue.x-k8s.io/{version}"


def test_what_kueue_says_of_a_run_stands_in_its_condition(server: Server, tmp_path: Path) -> None:
    """Its controller is played here: what it writes into the Workload and the Job is what its documentation says.

    While the run trains, Kueue is upgraded from a version that serves v1beta1 to one that serves v1beta2 alone.
    """
    workloads = serve_workloads(server, "v1beta1")
    with (
        open_team(server, "kueue") as team,
        run_operator(team, tmp_path / "operator.log", ORBIT_OPERATOR_RESYNC_SECONDS="1"),
    ):
        team.start_run("adder", lifecycle={"queueName": "team-queue"})
        team.wait_phase("adder", "Queued")

        def say(attempt: int, kind: str, status: str, reason: str, message: str, *, suspend: bool) -> None:
            """Kueue's word on an attempt; it lets go of the Job, or takes it back, as it says."""
            name = f"adder-a{attempt}"
            job = server.get(team.path("jobs", name))
            assert job is not None
            assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-queue"
            said = {"type": kind, "status": status, "reason": reason, "message": message}
            head = {"name": f"job-{name}", "labels": {"kueue.x-k8s.io/job-uid": job["metadata"]["uid"]}}
            body = {"apiVersion": workloads.removeprefix("/apis/"), "kind": "Workload", "metadata": head}
            path = f"{workloads}/namespaces/{team.namespace}/workloads/job-{name}"
            server.apply(path, {**body, "status": {"conditions": [said]}})
            server.merge(team.path("jobs", name), {"spec": {"suspend": suspend}})

        def admitted() -> Any:
            (found,) = [each for each in team.status("adder")["conditions"] if each["type"] == "Admitted"]
            return found["status"], found["reason"], found["message"]

        no_room = "couldn't assign flavors to pod set main: insufficient quota for nvidia.com/gpu"
        say(1, "QuotaReserved", "False", "Pending", no_room, suspend=True)
        wait_for(lambda: admitted() == ("False", "Pending", no_room), "its reason is mirrored", 20)
        assert team.status("adder")["whoActs"] == "Cluster"

        say(1, "Admitted", "True", "Admitted", "", suspend=False)
        team.wait_phase("adder", "Starting", "Running")
        wait_for(lambda: admitted()[0] == "True", "it is admitted", 20)
        (pod,) = team.pods()
        wait_for(lambda: (found := team.pods()) and found[0]["status"]["phase"] == "Running", f"{pod} runs", 20)

        workloads = serve_workloads(server, "v1beta2")
        preempted = "Preempted to accommodate a workload of higher priority"
        say(1, "Evicted", "True", "Preempted", preempted, suspend=True)
        wait_for(lambda: not team.pods(), "the pod ends", 30)
        # The Job controller, which looks once a second, has seen the pod end with 75, and then the Job has failed and
        # the next attempt queues anew; or it has only seen that the pod is gone, and then the same Job queues.
        time.sleep(3)
        newest = len(team.jobs())
        say(newest, "Evicted", "True", "Preempted", preempted, suspend=True)
        wait_for(lambda: admitted() == ("False", "Preempted", preempted), "why it waits is mirrored", 30)
        assert team.wait_phase("adder", "Queued")["attempt"] == newest

        team.exits = {newest: 0}
        say(newest, "Admitted", "True", "Admitted", "", suspend=False)
        status = team.wait_phase("adder", "Succeeded")
        assert [each["number"] for each in status["attempts"]] == list(range(1, newest + 1))
        assert status["attempts"][-1]["podUID"] != pod["metadata"]["uid"]
        assert (status["infraRestarts"], status["freeRestarts"]) == (0, newest - 1), "a preemption costs no retry"
        assert max(len(pods) for pods in team.history) == 1
