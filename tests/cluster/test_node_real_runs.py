"""The real run in its real image on the real node, with what ends it early: its rows show that nothing was lost.

What needs no training is in `test_node_faults`; installation by Helm and the life of a run that is left alone in
`test_end_to_end`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.bed.cluster import Cluster
from cluster.bed.images import build_product_image
from cluster.bed.services import store_environment
from cluster.by_hand import Object, Team, wait_for
from cluster.real_node import container_of, node_of, open_real_team, read_log, wait_for_pod

from tests.integration.killing import small_manifest

pytestmark = pytest.mark.cluster
BUCKET = "real-runs"
STEPS = 40


@pytest.fixture(scope="module")
def team(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    image, archive = build_product_image("runtime")
    cluster.import_image(archive)
    (cluster.buckets / BUCKET).mkdir()
    log = tmp_path_factory.mktemp("real-runs") / "operator.log"
    settings = {"ORBIT_OPERATOR_RUNTIME_IMAGE": image, "ORBIT_OPERATOR_RUN_CPU_PER_GPU": "0.125"}
    with open_real_team(cluster, BUCKET, log, **settings) as (team, _):
        # One thread each: how many there are decides the order of sums, and with it the last bits.
        right = {**store_environment(), "OMP_NUM_THREADS": "1", "ORBIT_STORE_DEADLINE_SECONDS": "5"}
        for name, data in {"store": right, "wrong": {**right, "AWS_SECRET_ACCESS_KEY": "not-the-one"}}.items():
            secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data}
            team.server.apply(team.path("secrets", name), secret)
        # All at once: while one loads, another waits.
        start(team, "alone", gpus=8)
        start(team, "disturbed", gpus=8)
        start(team, "denied", secret="wrong")
        start(team, "nowhere", bucket="there-is-no-such-bucket", maxInfraRestarts=0)
        yield team


def start(
    team: Team, name: str, *, bucket: str = BUCKET, secret: str = "store", gpus: int = 0, **lifecycle: Any
) -> None:
    spec: Object = dict(small_manifest(steps=STEPS)["spec"])
    spec |= {"storage": {"uri": f"s3://{bucket}", "credentialsSecretName": secret}, "observability": {}}
    spec |= {"lifecycle": lifecycle, "placement": {"gpus": gpus}}
    team.start_run(name, **spec)


def wait_for_file(path: Path, seconds: float = 180) -> None:
    """An object of the store is a file here; this costs the run nothing."""
    wait_for(path.exists, str(path), seconds)


def rows_of(folder: Path) -> list[Object]:
    from orbit_runtime.observability.metrics import TIME_FIELDS

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in row.items() if name not in TIME_FIELDS} for row in rows]


def test_suspended_resumed_and_on_a_lost_node_the_curve_continues_bit_for_bit_and_the_zombie_is_refused(
    cluster: Cluster, team: Team
) -> None:
    """Beside a run that is left alone: SIGTERM, another pod, a node that is lost, and its pod that writes again."""
    alone, folder = cluster.buckets / BUCKET / "alone", cluster.buckets / BUCKET / "disturbed"
    wait_for_file(folder / "metrics" / "step-000003.json")
    team.edit_run("disturbed", lifecycle={"suspend": True})
    status = team.wait_phase("disturbed", "Suspended")
    assert status["attempts"][0]["ending"]["exitCode"] == 75
    assert 3 <= status["checkpoint"]["step"] < STEPS
    kept = sorted(path.name for path in (folder / "metrics").iterdir())
    team.edit_run("disturbed", lifecycle={"suspend": False})

    pod = wait_for_pod(team, "disturbed", 2)
    lost = node_of(cluster, pod)
    wait_for_file(folder / "metrics" / f"step-{int(kept[-1][5:11]) + 3:06d}.json")
    lost.ctr("tasks", "pause", container_of(pod))
    lost.freeze()
    frozen = time.monotonic()
    try:
        before = len(list((folder / "metrics").glob("step-*.json")))
        assert before < STEPS, "it was faster than its node was lost: give it more steps"
        team.wait_phase("alone", "Succeeded")
        wait_for(lambda: len(team.status("disturbed")["attempts"]) == 3, "a third attempt", 120)
        second = team.status("disturbed")["attempts"][1]
        assert (second["ending"]["reason"], second["node"]) == ("NodeLost", lost.name)
        wait_for_file(folder / "executions" / "000003.json")
        lost.ctr("tasks", "resume", container_of(pod))
        try:
            wait_for(lambda: "taken over" in read_log(cluster, pod), "the zombie is told", 60)
        except AssertionError as error:
            raise AssertionError(f"{error}; its log: {read_log(cluster, pod)[-2000:]}") from None
    finally:
        lost.thaw()
    print(f"the node was lost for {time.monotonic() - frozen:.0f} s")
    status = team.wait_phase("disturbed", "Succeeded", seconds=180)
    results = [(each["ending"]["result"], each["ending"]["reason"]) for each in status["attempts"]]
    assert results == [("Stopped", "Checkpointed"), ("Failed", "NodeLost"), ("Succeeded", "Succeeded")]
    assert (status["freeRestarts"], status["infraRestarts"], status["execution"]) == (1, 1, 3)
    assert status["attempts"][2]["node"] != lost.name

    assert rows_of(folder) == rows_of(alone)
    assert len(rows_of(folder)) == STEPS
    reports = [json.loads((each / "report.json").read_text(encoding="utf-8")) for each in (folder, alone)]
    assert reports[0]["adapter_digest"] == reports[1]["adapter_digest"]
    assert [report["executions"] for report in reports] == [3, 1]

    wait_for(lambda: cluster.is_ready(lost), "the node is back", 60)
    wait_for(lambda: pod["metadata"]["name"] not in [each["metadata"]["name"] for each in team.pods()], "no zombie")
    assert team.status("disturbed")["attempts"] == status["attempts"]


def test_wrong_credentials_and_a_missing_bucket_are_told_apart_and_say_who_must_act(team: Team) -> None:
    denied = team.wait_phase("denied", "Failed", seconds=180)
    assert (denied["reason"], denied["whoActs"]) == ("CredentialsInvalid", "User")
    assert denied["attempts"][0]["ending"]["exitCode"] == 77
    assert f"s3://{BUCKET}" in denied["message"]
    nowhere = team.wait_phase("nowhere", "Failed", seconds=180)
    ending = nowhere["attempts"][0]["ending"]
    assert (ending["reason"], ending["exitCode"], ending["budget"]) == ("ObjectStoreUnavailable", 74, "Infra")
    assert "there-is-no-such-bucket" in nowhere["message"]
