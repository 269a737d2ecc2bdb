"""The real run in its real image on the real node, with what ends it early: its rows show that nothing was lost.

What happens to them: `real_story`. What needs no training is in `test_node_faults`; installation by Helm and the life
of a run that is left alone in `test_end_to_end`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.bed.cluster import Cluster
from cluster.by_hand import Object, wait_for
from cluster.real_node import PATIENCE, SCRIPTED, build_scripted_image, start_scripted, wait_for_pod, wait_reason
from cluster.real_story import STEPS, RealStory

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def story(real_story: RealStory) -> Iterator[RealStory]:
    yield real_story
    real_story.end()


def rows_of(folder: Path) -> list[Object]:
    from orbit_runtime.observability.metrics import TIME_FIELDS

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in row.items() if name not in TIME_FIELDS} for row in rows]


def test_suspended_resumed_and_on_a_lost_node_the_curve_continues_bit_for_bit_and_the_zombie_is_refused(
    cluster: Cluster, story: RealStory
) -> None:
    lived, team = story.lived.result(), story.team
    assert lived.suspended["attempts"][0]["ending"]["exitCode"] == 75
    assert 3 <= lived.suspended["checkpoint"]["step"] < STEPS
    assert (lived.second["ending"]["reason"], lived.second["node"]) == ("NodeLost", lived.lost.name)

    status = team.wait_phase("disturbed", "Succeeded", seconds=PATIENCE)
    results = [(each["ending"]["result"], each["ending"]["reason"]) for each in status["attempts"]]
    assert results == [("Stopped", "Checkpointed"), ("Failed", "NodeLost"), ("Succeeded", "Succeeded")]
    assert (status["freeRestarts"], status["infraRestarts"], status["execution"]) == (1, 1, 3)
    assert status["attempts"][2]["node"] != lived.lost.name
    resumed = f"attempt 2 continues after step {lived.suspended['checkpoint']['step']}"
    assert resumed in team.tellings("disturbed")

    folder, alone = story.folder("disturbed"), story.folder("alone")
    assert rows_of(folder) == rows_of(alone)
    assert len(rows_of(folder)) == STEPS
    reports = [json.loads((each / "report.json").read_text(encoding="utf-8")) for each in (folder, alone)]
    assert reports[0]["adapter_digest"] == reports[1]["adapter_digest"]
    assert [report["executions"] for report in reports] == [3, 1]

    wait_for(lambda: cluster.is_ready(lived.lost), "the node is back", 60)
    zombie = lived.pod["metadata"]["name"]
    wait_for(lambda: zombie not in [each["metadata"]["name"] for each in team.pods()], "no zombie")
    assert team.status("disturbed")["attempts"] == status["attempts"]


def test_a_missing_bucket_is_named_and_may_be_the_stores_fault(story: RealStory) -> None:
    nowhere = story.team.wait_phase("nowhere", "Failed", seconds=180)
    ending = nowhere["attempts"][0]["ending"]
    assert (ending["reason"], ending["exitCode"], ending["budget"]) == ("ObjectStoreUnavailable", 74, "Infra")
    assert "there-is-no-such-bucket" in nowhere["message"]


def test_a_run_that_finds_no_gpus_waits_and_starts_when_some_are_free(cluster: Cluster, story: RealStory) -> None:
    """They are the real runs' until those have ended."""
    cluster.import_image(build_scripted_image())
    team = story.team
    whole = {"placement": {"gpus": 8, "gpuProduct": "NVIDIA-B200", "image": SCRIPTED}}
    for name in ("first", "second", "third"):
        start_scripted(team, name, {}, **whole)
        if name != "third":
            wait_for_pod(team, name)
    status = wait_reason(team, "third", "Unschedulable")
    assert (status["phase"], status["whoActs"]) == ("Pending", "Cluster")
    assert "Insufficient nvidia.com/gpu" in status["message"]
    team.server.delete(team.path("orbitruns", "first"))
    status = team.wait_phase("third", "Running")
    assert (status["attempt"], len(status["attempts"])) == (1, 1)
    start_scripted(team, "elsewhere", {}, placement={"gpus": 0, "gpuProduct": "NVIDIA-H100", "image": SCRIPTED})
    assert "affinity" in wait_reason(team, "elsewhere", "Unschedulable")["message"]
