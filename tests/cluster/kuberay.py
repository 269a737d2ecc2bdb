"""KubeRay: its CRDs, its operator as a process where that was built, and its part played by hand.

Belongs here: RayClusters and what KubeRay makes of them. Does not belong here: what a test expects of a run over
several nodes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from cluster.bed.processes import WITH_ITS_PARENT
from cluster.bed.programs import FOLDERS
from cluster.by_hand import Object, Server, Team, repeated, wait_for

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@contextmanager
def install_crd(server: Server) -> Iterator[None]:
    """That of RayClusters, of its module's own file, until the end of the block."""
    (folder,) = [Path(each) for each in os.environ[FOLDERS].split(os.pathsep) if (Path(each) / "kuberay-crds").is_dir()]
    crd = yaml.safe_load((folder / "kuberay-crds" / "ray.io_rayclusters.yaml").read_text(encoding="utf-8"))
    place = f"{CRDS}/rayclusters.ray.io"
    server.create(CRDS, crd)
    try:
        wait_for(lambda: server.get("/apis/ray.io/v1/rayclusters"), "the API server knows RayClusters")
        yield
    finally:
        server.delete(place)
        wait_for(lambda: server.get(place) is None, "they are gone")


def find_operator() -> str | None:
    """The program, where `tools/cluster_programs.sh kuberay` was called."""
    return shutil.which("kuberay", path=os.environ[FOLDERS])


@contextmanager
def run_kuberay(program: str, kubeconfig: str, log: Path) -> Iterator[None]:
    """Its operator, which watches every namespace, until SIGTERM has ended it."""
    command = [*WITH_ITS_PARENT, program, "--metrics-addr=127.0.0.1:0", "--health-probe-bind-address=127.0.0.1:0",
               "--enable-leader-election=false"]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "KUBECONFIG": kubeconfig})
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def clusters(server: Server, team: Team) -> list[Object]:
    """RayClusters that nobody deletes."""
    found = server.items(f"/apis/ray.io/v1/namespaces/{team.namespace}/rayclusters")
    return [each for each in found if "deletionTimestamp" not in each["metadata"]]


def make_pods(team: Team, cluster: Object, *, few: bool = False) -> None:
    """The pods of a RayCluster that are not there, of its own templates; `few`: all but the last."""
    there = {pod["metadata"]["name"] for pod in team.pods()}
    (group,) = cluster["spec"]["workerGroupSpecs"]
    named = cluster["metadata"]
    owner = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": named["name"], "uid": named["uid"]}
    templates = [cluster["spec"]["headGroupSpec"]["template"], *[group["template"]] * group["replicas"]]
    for index, template in enumerate(templates[:-1] if few else templates):
        head = {**template["metadata"], "name": f"{named['name']}-{index}", "ownerReferences": [owner]}
        if head["name"] in there:
            continue
        (container,) = template["spec"]["containers"]
        started = {**container, "command": ["ray", "start", *([] if index else ["--head"])]}
        spec = {**template["spec"], "containers": [started]}
        team.server.create(team.path("pods"), {"apiVersion": "v1", "kind": "Pod", "metadata": head, "spec": spec})


@contextmanager
def play_kuberay(team: Team) -> Iterator[None]:
    """Each RayCluster of the namespace has its pods while nobody suspends it, and none else."""

    def act() -> None:
        living = {each["metadata"]["uid"]: each for each in clusters(team.server, team)}
        for each in living.values():
            if not each["spec"].get("suspend"):
                make_pods(team, each)
        for pod in team.pods():
            owners = [
                each["uid"] for each in pod["metadata"].get("ownerReferences", ()) if each["kind"] == "RayCluster"
            ]
            if any(uid not in living or living[uid]["spec"].get("suspend") for uid in owners):
                team.server.delete(team.path("pods", pod["metadata"]["name"]))

    with repeated(act, 0.5):
        yield
