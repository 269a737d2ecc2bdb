"""Runs that wait in Kueue's queues: its own program, installed by its own chart, on the real node.

What its API looks like from one version to the next: `test_operator_and_api_server`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.bed.cluster import Cluster
from cluster.bed.images import build_image, images_folder, save_image
from cluster.bed.node import GPU_PRODUCT, NUM_GPUS
from cluster.bed.processes import run
from cluster.bed.programs import FOLDERS, find_program
from cluster.by_hand import Object, Server, Team, connect, now, wait_for
from cluster.kuberay import find_operator, install_crd, play_kuberay, run_kuberay
from cluster.real_node import PATIENCE, build_scripted_image, open_real_team, start_scripted

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

API = "/apis/kueue.x-k8s.io/v1beta1"
IMAGE = "localhost/kueue"
CHECK = "provision"
GPU = "nvidia.com/gpu"
CLAIM = "models"
SHARED: dict[str, tuple[str, Object]] = {
    "b200": ("ResourceFlavor", {"nodeLabels": {"nvidia.com/gpu.product": GPU_PRODUCT}}),
    "high": ("WorkloadPriorityClass", {"value": 1000}),
    CHECK: ("AdmissionCheck", {"controllerName": "example.com/by-hand"}),
    "gpus": ("ClusterQueue", {"preemption": {"withinClusterQueue": "LowerPriority"}}),
    "checked": ("ClusterQueue", {"admissionChecks": [CHECK]}),
    "nodes": ("ClusterQueue", {"preemption": {"withinClusterQueue": "LowerPriority"}}),
}
QUOTAS: dict[str, Object] = {"nodes": {GPU: 2 * NUM_GPUS, "cpu": 8, "memory": "64Gi"}}
"""Of queues that have not one node's GPUs alone. The head of a RayCluster requests a core and memory, no GPU."""
"""Name → kind and spec of what belongs to no namespace, in the order in which one needs the other."""


def path_of(kind: str, name: str) -> str:
    plural = f"{kind.lower()}es" if kind.endswith("s") else f"{kind.lower()}s"
    return f"{API}/{plural}/{name}"


def find_part(name: str) -> Path:
    """The program, or the chart: both of Kueue's module."""
    found = [Path(each, name) for each in os.environ[FOLDERS].split(os.pathsep) if Path(each, name).exists()]
    if not found:
        pytest.skip(f"there is no {name}: tools/cluster_programs.sh kueue kuberay-crds")
    return found[0].resolve()


def build_kueue_image(program: Path, version: str) -> Path:
    """What its Dockerfile makes of the program; returns the archive."""
    archive = images_folder() / f"{program.parent.name}.tar"
    if not archive.exists():
        with tempfile.TemporaryDirectory(dir=images_folder()) as name:
            shutil.copy(program, Path(name, "manager"))
            lines = (
                "FROM scratch",
                "WORKDIR /",
                "USER 65532:65532",
                'ENTRYPOINT ["/manager"]',
                "COPY manager /manager",
            )
            Path(name, "Containerfile").write_text("\n".join(lines) + "\n")
            build_image(Path(name), f"{IMAGE}:{version}")
            save_image(f"{IMAGE}:{version}", archive)
    return archive


@pytest.fixture(scope="module")
def kueue(cluster: Cluster) -> Iterator[Server]:
    """Kueue in the cluster, which knows RayClusters, with a queue of as many GPUs as a node has, one with an
    AdmissionCheck besides, and one of two nodes."""
    program, chart = find_part("kueue"), find_part("kueue-chart")
    version = yaml.safe_load((chart / "Chart.yaml").read_text(encoding="utf-8"))["appVersion"]
    cluster.import_image(build_kueue_image(program, version))
    cluster.import_image(build_scripted_image())
    helm = partial(run, find_program("helm4"), "--kubeconfig", cluster.kubeconfig, seconds=900)
    image = f"repository={IMAGE},tag={version},pullPolicy=Never".replace(",", ",controllerManager.manager.image.")
    server = connect(cluster.kubeconfig)
    # Which kinds there are it asks when it starts.
    with install_crd(server):
        helm("install", "kueue", chart, "--namespace", "kueue-system", "--create-namespace", "--wait", "--timeout",
             "14m", "--set", f"controllerManager.manager.image.{image}")  # fmt: skip
        try:
            for name, (kind, spec) in SHARED.items():
                make_shared(server, name, kind, spec)
            yield server
        finally:
            for name, (kind, _) in reversed(SHARED.items()):
                server.delete(place := path_of(kind, name))
                wait_for(lambda place=place: server.get(place) is None, f"{kind} {name} goes")
            helm("uninstall", "kueue", "--namespace", "kueue-system", "--wait", "--timeout", "5m")
            server.delete("/api/v1/namespaces/kueue-system")


def make_shared(server: Server, name: str, kind: str, spec: Object) -> None:
    """Kueue judges each by a webhook of its own, which may not answer yet."""
    if kind == "ClusterQueue":
        quotas = QUOTAS.get(name, {GPU: NUM_GPUS})
        flavor = {"name": "b200", "resources": [{"name": each, "nominalQuota": most} for each, most in quotas.items()]}
        group = {"coveredResources": [*quotas], "flavors": [flavor]}
        spec = {"namespaceSelector": {}, "resourceGroups": [group], **spec}
    # The value of a priority is no part of a spec.
    body = spec if kind == "WorkloadPriorityClass" else {"spec": spec}
    made = {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": kind, "metadata": {"name": name}, **body}

    def apply() -> Object | None:
        try:
            return server.apply(path_of(kind, name), made)
        except AssertionError as error:
            print(error)
            return None

    wait_for(apply, f"Kueue takes a {kind}")
    if kind == "AdmissionCheck":
        active = {"type": "Active", "status": "True", "reason": "ByHand", "message": "", "lastTransitionTime": now()}
        server.merge(f"{path_of(kind, name)}/status", {"status": {"conditions": [active]}})


@pytest.fixture(scope="module")
def team(kueue: Server, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    """A namespace with a LocalQueue for each, of which one is Kueue's default."""
    with open_real_team(cluster, "queues", tmp_path_factory.mktemp("queues") / "operator.log") as (team, _):
        for name, queue in (("gpus", "gpus"), ("nodes", "nodes"), ("checked", "checked"), ("default", "checked")):
            body = {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "LocalQueue", "metadata": {"name": name}}
            kueue.apply(f"{API}/namespaces/queues/localqueues/{name}", {**body, "spec": {"clusterQueue": queue}})
        for name in ("gpus", "nodes", "checked"):
            wait_for(lambda name=name: is_active(kueue, name), f"{name} is active", PATIENCE)
        yield team


def is_active(server: Server, queue: str) -> bool:
    return status_of((server.get(path_of("ClusterQueue", queue)) or {}).get("status") or {}, "Active") == "True"


def status_of(status: Object, condition: str) -> str | None:
    return next((each["status"] for each in status.get("conditions") or () if each["type"] == condition), None)


def start(team: Team, name: str, queue: str | None, **placement: Any) -> None:
    lifecycle = {} if queue is None else {"queueName": queue}
    start_scripted(team, name, {}, placement={"gpus": NUM_GPUS, **placement}, lifecycle=lifecycle)


def wait_admitted(team: Team, name: str) -> None:
    status = team.wait_phase(name, "Running", seconds=PATIENCE)
    assert admission_of(status)[0] == "True"


def admission_of(status: Object) -> tuple[str, str, str]:
    (found,) = [each for each in status["conditions"] if each["type"] == "Admitted"]
    return found["status"], found["reason"], found["message"]


def wait_queued(team: Team, name: str, words: str) -> Object:
    """The status once the run waits for these words of Kueue's."""

    def probe() -> Object | None:
        status = team.status(name)
        return status if status.get("phase") == "Queued" and words in status["message"] else None

    try:
        status = wait_for(probe, f"{name} waits: {words}", PATIENCE)
    except AssertionError as error:
        raise AssertionError(f"{error}; its status: {team.status(name)}") from None
    assert (status["reason"], status["whoActs"]) == ("QueuedByKueue", "Cluster")
    assert admission_of(status)[0] == "False"
    return status


def end(team: Team, *names: str) -> None:
    for name in names:
        team.server.delete(team.path("orbitruns", name))
        wait_for(lambda name=name: team.server.get(team.path("orbitruns", name)) is None, f"{name} goes", PATIENCE)


def judge(team: Team, run: str, state: str, message: str) -> None:
    """The AdmissionCheck's controller: what it says of a Workload that waits for it, or was let go by it."""
    before = "Ready" if state == "Retry" else "Pending"
    wait_for(lambda: say(team, run, before, state, message), f"{run} has a Workload whose check is {before}", PATIENCE)


def admit(team: Team, run: str, message: str) -> None:
    """The controller says Ready of every Workload that waits, also of one that an eviction made wait once more."""

    def probe() -> bool:
        say(team, run, "Pending", "Ready", message)
        return bool(team.status(run).get("phase") == "Running")

    wait_for(probe, f"{run} is admitted", PATIENCE)
    wait_admitted(team, run)


def say(team: Team, run: str, before: str, state: str, message: str) -> bool:
    """Whether there was a Workload whose check was in the state `before`."""
    workloads = f"{API}/namespaces/{team.namespace}/workloads"
    said = {"name": CHECK, "state": state, "message": message, "lastTransitionTime": now()}
    found = False
    for job in team.server.items(team.path("jobs"), labelSelector=f"orbitrl.dev/run-name={run}"):
        own = f"kueue.x-k8s.io/job-uid={job['metadata']['uid']}"
        for each in team.server.items(workloads, labelSelector=own):
            status = each.get("status") or {}
            states = [check["state"] for check in status.get("admissionChecks") or ()]
            has_quota = status_of(status, "QuotaReserved") == "True"
            if has_quota and states == [before] and status_of(status, "Finished") != "True":
                place = f"{workloads}/{each['metadata']['name']}/status"
                team.server.merge(place, {"status": {"admissionChecks": [said]}})
                found = True
    return found


def test_a_run_waits_for_quota_that_another_gives_back_when_it_is_suspended_or_preempted(team: Team) -> None:
    no_room = f"insufficient unused quota for {GPU}"
    start(team, "first", "gpus")
    wait_admitted(team, "first")
    start(team, "second", "gpus")
    wait_queued(team, "second", no_room)
    team.edit_run("first", lifecycle={"suspend": True})
    team.wait_phase("first", "Suspended", seconds=PATIENCE)
    wait_admitted(team, "second")
    team.edit_run("first", lifecycle={"suspend": False})
    wait_queued(team, "first", no_room)

    start(team, "urgent", "gpus", pod={"labels": {"kueue.x-k8s.io/priority-class": "high"}})
    wait_admitted(team, "urgent")
    status = wait_queued(team, "second", "")
    assert status["infraRestarts"] == 0, "a preemption costs no retry"
    end(team, "first", "urgent")
    wait_admitted(team, "second")
    assert team.status("second")["infraRestarts"] == 0
    end(team, "second")


@pytest.mark.parametrize("queue", ["checked", None], ids=["named", "default"])
def test_a_run_waits_for_an_admission_check_in_its_words_and_again_when_that_takes_it_back(
    team: Team, queue: str | None
) -> None:
    start(team, "checked", queue)
    judge(team, "checked", "Pending", "not enough resources, ETA 05:00")
    status = wait_queued(team, "checked", f"admission check {CHECK}: not enough resources, ETA 05:00")
    assert admission_of(status)[1] == "AdmissionCheckPending"
    admit(team, "checked", "provisioned")
    judge(team, "checked", "Retry", "the machines were taken back")
    wait_queued(team, "checked", "")
    admit(team, "checked", "provisioned anew")
    assert team.status("checked")["infraRestarts"] == 0
    end(team, "checked")


def test_a_run_whose_admission_check_is_rejected_says_so(team: Team) -> None:
    start(team, "rejected", "checked")
    judge(team, "rejected", "Rejected", "over budget")
    wait_queued(team, "rejected", f"Admission check(s): {CHECK}, were rejected")
    end(team, "rejected")


@pytest.fixture
def ranks(team: Team, cluster: Cluster, tmp_path: Path) -> Iterator[None]:
    """KubeRay, its own operator where it was built, and a folder of models that every node has."""
    claim = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = {
        "capacity": {"storage": "1Gi"},
        "hostPath": {"path": str(cluster.folder / CLAIM), "type": "DirectoryOrCreate"},
    }
    want = {"volumeName": CLAIM, "resources": {"requests": {"storage": "1Gi"}}}
    head = {"apiVersion": "v1", "metadata": {"name": CLAIM}}
    team.server.apply(
        place := f"/api/v1/persistentvolumes/{CLAIM}", {**head, "kind": "PersistentVolume", "spec": {**claim, **volume}}
    )
    team.server.apply(
        team.path("persistentvolumeclaims", CLAIM), {**head, "kind": "PersistentVolumeClaim", "spec": {**claim, **want}}
    )
    program = find_operator()
    kuberay = run_kuberay(program, team.server.kubeconfig, tmp_path / "kuberay.log") if program else play_kuberay(team)
    with kuberay:
        yield
    team.server.delete(team.path("persistentvolumeclaims", CLAIM))
    team.server.delete(place)


@pytest.mark.usefixtures("ranks")
def test_a_run_over_two_nodes_waits_for_both_and_costs_no_restart_when_they_are_taken_back(team: Team) -> None:
    """Its ranks and its own pod are two workloads of Kueue's, admitted one after the other."""
    no_room, both = f"insufficient unused quota for {GPU}", {"nodes": 2, "modelCache": {"claimName": CLAIM}}
    for name in ("first", "second"):
        start(team, name, "nodes")
        wait_admitted(team, name)
    start(team, "large", "nodes", **both)
    wait_queued(team, "large", no_room)
    assert not [job for job in team.jobs() if job.startswith("large")], "no pod of its own before its ranks have theirs"
    end(team, "first")
    wait_for(lambda: [job for job in team.jobs() if job.startswith("large")], "its ranks have their node", PATIENCE)
    wait_queued(team, "large", no_room)
    end(team, "second")
    wait_admitted(team, "large")

    start(team, "urgent", "nodes", **both, pod={"labels": {"kueue.x-k8s.io/priority-class": "high"}})
    wait_admitted(team, "urgent")
    status = wait_queued(team, "large", "")
    spent = {name: status[name] for name in ("userRetries", "infraRestarts")}
    assert not any(spent.values()), f"a preemption costs no retry: {spent}"
    end(team, "urgent")
    wait_admitted(team, "large")
    status = team.status("large")
    assert {name: status[name] for name in spent} == spent
    end(team, "large")
