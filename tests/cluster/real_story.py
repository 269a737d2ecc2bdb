"""A real run that is suspended, resumed and loses its node, beside one that is left alone. It lives beside other tests.

Belongs here: the runs, and what happens to them. Does not belong here: what is expected of the result
(`test_node_real_runs`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.bed.cluster import Cluster
from cluster.bed.images import build_product_image
from cluster.bed.node import Node
from cluster.bed.services import store_environment
from cluster.by_hand import Object, Team, wait_for
from cluster.real_node import PATIENCE, container_of, node_of, open_real_team, read_log, wait_for_pod

from tests.integration.killing import small_manifest

BUCKET = "real-runs"
STEPS = 40


@dataclass(frozen=True)
class Lived:
    """What was seen of the disturbed run before its third attempt."""

    suspended: Object
    """Its status then."""
    lost: Node
    pod: Object
    """The second attempt's pod, on the lost node."""
    second: Object
    """That attempt, as the status told of it."""


@dataclass
class RealStory:
    """All real runs, under way."""

    cluster: Cluster
    team: Team
    lived: Future[Lived]
    ending: ExitStack

    def folder(self, run: str) -> Path:
        return self.cluster.buckets / BUCKET / run

    def end(self) -> None:
        """Takes everything away; may be asked again."""
        self.ending.close()


@contextmanager
def run_real_story(cluster: Cluster, log: Path) -> Iterator[RealStory]:
    """Starts all of them at once: while one loads, another waits."""
    image, archive = build_product_image("runtime")
    cluster.import_image(archive)
    (cluster.buckets / BUCKET).mkdir()
    settings = {"ORBIT_OPERATOR_RUNTIME_IMAGE": image, "ORBIT_OPERATOR_RUN_CPU_PER_GPU": "0.125"}
    with ExitStack() as ending:
        team, _ = ending.enter_context(open_real_team(cluster, BUCKET, log, **settings))
        # One thread each: how many there are decides the order of sums, and with it the last bits.
        data = {**store_environment(), "OMP_NUM_THREADS": "1", "ORBIT_STORE_DEADLINE_SECONDS": "5"}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "store"}, "stringData": data}
        team.server.apply(team.path("secrets", "store"), secret)
        start(team, "alone", gpus=8)
        start(team, "disturbed", gpus=8)
        start(team, "nowhere", bucket="there-is-no-such-bucket", maxInfraRestarts=0)
        pool = ending.enter_context(ThreadPoolExecutor(1))
        yield RealStory(cluster, team, pool.submit(disturb, cluster, team), ending)


def start(team: Team, name: str, *, bucket: str = BUCKET, gpus: int = 0, **lifecycle: Any) -> None:
    spec: Object = dict(small_manifest(steps=STEPS)["spec"])
    spec |= {"storage": {"uri": f"s3://{bucket}", "credentialsSecretName": "store"}, "observability": {}}
    spec |= {"lifecycle": lifecycle, "placement": {"gpus": gpus}}
    team.start_run(name, **spec)


def disturb(cluster: Cluster, team: Team) -> Lived:
    """SIGTERM, another pod, a node that is lost, and its pod that writes again. Returns when the node is back."""
    folder = cluster.buckets / BUCKET / "disturbed"
    wait_for_file(folder / "metrics" / "step-000003.json")
    team.edit_run("disturbed", lifecycle={"suspend": True})
    suspended = team.wait_phase("disturbed", "Suspended", seconds=PATIENCE)
    kept = sorted(path.name for path in (folder / "metrics").iterdir())
    team.edit_run("disturbed", lifecycle={"suspend": False})

    pod = wait_for_pod(team, "disturbed", 2, seconds=PATIENCE)
    lost = node_of(cluster, pod)
    wait_for_file(folder / "metrics" / f"step-{int(kept[-1][5:11]) + 3:06d}.json")
    # A quick machine is there before the operator asks for the first time, and then nobody could tell where it began.
    wait_for(lambda: team.status("disturbed")["attempts"][1].get("runTime"), "the operator has heard of it", 30)
    lost.ctr("tasks", "pause", container_of(pod))
    lost.freeze()
    frozen = time.monotonic()
    try:
        before = len(list((folder / "metrics").glob("step-*.json")))
        assert before < STEPS, "it was faster than its node was lost: give it more steps"
        team.wait_phase("alone", "Succeeded", seconds=PATIENCE)
        wait_for(lambda: len(team.status("disturbed")["attempts"]) == 3, "a third attempt", PATIENCE)
        second = team.status("disturbed")["attempts"][1]
        wait_for_file(folder / "executions" / "000003.json")
        lost.ctr("tasks", "resume", container_of(pod))
        try:
            wait_for(lambda: "taken over" in read_log(cluster, pod), "the zombie is told", PATIENCE)
        except AssertionError as error:
            raise AssertionError(f"{error}; its log: {read_log(cluster, pod)[-2000:]}") from None
    finally:
        lost.thaw()
    print(f"the node was lost for {time.monotonic() - frozen:.0f} s")
    return Lived(suspended, lost, pod, dict(second))


def wait_for_file(path: Path) -> None:
    """An object of the store is a file here; this costs the run nothing."""
    wait_for(path.exists, str(path), PATIENCE)
