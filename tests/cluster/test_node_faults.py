"""What a real kubelet, scheduler and eviction manager do to a run's pod, and what the operator makes of it.

The pods are the operator's own, with `fakes/scripted_orbit.py` in place of `orbit`: a pod that ends as it is told says
more about endings than one that must first be made to fail. The real one: `test_node_real_runs`. The list of all
faults and where each is shown: README.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from cluster.by_hand import Object, Team, wait_for
from cluster.fault_stories import ENDINGS, LONGEST, Stories
from cluster.real_node import find_pod, wait_for_pod, wait_reason

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("real_story_ahead", "befallen")]
SAID = "spec.data: Größe 猫: zu klein; mehr davon"


@pytest.fixture(scope="module")
def shared(fault_stories: Stories) -> Iterator[Stories]:
    yield fault_stories
    fault_stories.end()


@pytest.fixture
def team(shared: Stories) -> Team:
    assert shared.operator.process.poll() is None, shared.operator.text[-3000:]
    return shared.team


@pytest.fixture(scope="module")
def befallen(shared: Stories) -> dict[str, Any]:
    """What was seen before it happened, by the run's name."""
    return {run: task.result() for run, task in shared.befallen.items()}


def first_ending(team: Team, run: str, seconds: float = 120) -> Object:
    """How the first attempt ended."""
    return dict(wait_for(lambda: team.status(run).get("attempts", [{}])[0].get("ending"), f"{run}-a1 ends", seconds))


def list_children(team: Team, run: str) -> list[str]:
    """Everything that has the run's name on it."""
    found = []
    for kind in ("jobs", "pods", "configmaps"):
        found += team.server.items(team.path(kind), labelSelector=f"orbitrl.dev/run-name={run}")
    policies = f"/apis/networking.k8s.io/v1/namespaces/{team.namespace}/networkpolicies"
    found += team.server.items(policies, labelSelector=f"orbitrl.dev/run-name={run}")
    return [each["metadata"]["name"] for each in found]


def test_every_exit_code_of_the_contract_is_tried() -> None:
    assert {0, *range(64, 67), 70, 73, 74, 75, *range(77, 87)} <= set(ENDINGS)


def test_an_image_that_is_missing_is_the_users_to_name_and_the_run_can_be_deleted(team: Team) -> None:
    status = wait_reason(team, "no-image", "ImagePullFailed")
    assert (status["phase"], status["whoActs"]) == ("Starting", "User")
    assert "there-is-no-such-image" in status["message"]
    team.server.delete(team.path("orbitruns", "no-image"))
    wait_for(lambda: not list_children(team, "no-image"), "everything of it goes")


@pytest.mark.parametrize("code", [code for code in ENDINGS if code not in (0, 75)])
def test_an_exit_code_leads_to_the_documented_class_budget_and_message(code: int, team: Team) -> None:
    reason, owner, budget = ENDINGS[code]
    status = team.wait_phase(f"exit-{code}", "Failed", seconds=180)
    (attempt,) = status["attempts"]
    ending = attempt["ending"]
    seen = {name: ending[name] for name in ("result", "reason", "whoActs", "budget", "exitCode", "message")}
    assert seen == {
        "result": "Failed", "reason": reason, "whoActs": owner, "budget": budget, "exitCode": code, "message": SAID,
    }  # fmt: skip
    assert (status["userRetries"], status["infraRestarts"]) == ((1, 0) if budget == "User" else (0, 1))
    assert status["reason"] == (reason if budget == "User" else "InfraRestartsExhausted")
    assert status["whoActs"] == owner
    assert status["message"] == SAID


def test_done_is_done_and_a_checkpoint_on_request_is_free(team: Team) -> None:
    assert team.wait_phase("exit-0", "Succeeded")["attempts"][0]["ending"]["exitCode"] == 0
    # Ended on request although nobody asked, again and again: free seven times without progress, then it costs.
    ending = first_ending(team, "exit-75")
    assert (ending["result"], ending["reason"], ending["budget"]) == ("Stopped", "Checkpointed", "Free")
    status = team.wait_phase("exit-75", "Failed", seconds=240)
    assert status["reason"] == "InfraRestartsExhausted"
    assert status["freeRestarts"] == 7


def test_the_longest_name_makes_a_pod(team: Team) -> None:
    assert team.wait_phase(LONGEST, "Succeeded")["attempts"][0]["pod"].startswith("nnnn")


def test_a_container_beyond_its_memory_is_out_of_memory(team: Team) -> None:
    ending = first_ending(team, "eats")
    assert (ending["reason"], ending["exitCode"], ending["whoActs"]) == ("OutOfMemory", 137, "User")
    assert "memory" in ending["message"]


def test_a_pod_that_the_kubelet_evicts_says_what_it_used_up(team: Team) -> None:
    ending = first_ending(team, "fills")
    assert (ending["reason"], ending["budget"], ending["whoActs"]) == ("StorageLimitExceeded", "Infra", "User")
    assert 'limit "1Mi"' in ending["message"] or "exceeds" in ending["message"], ending


def test_a_pod_that_is_killed_is_the_infrastructures_and_the_run_goes_on(team: Team) -> None:
    ending = first_ending(team, "killed")
    assert (ending["reason"], ending["exitCode"], ending["budget"]) == ("Killed", 137, "Infra")
    assert team.wait_phase("killed", "Succeeded")["infraRestarts"] == 1


def test_a_pod_deleted_by_hand_checkpoints_and_the_run_goes_on_at_no_cost(team: Team) -> None:
    status = team.wait_phase("deleted", "Succeeded")
    assert status["attempts"][0]["ending"]["reason"] == "Checkpointed"
    assert (status["freeRestarts"], status["infraRestarts"]) == (1, 0)


def test_a_drained_node_costs_nothing(team: Team) -> None:
    """It evicts by the API: SIGTERM, and a checkpoint."""
    status = team.wait_phase("drained", "Succeeded")
    ending = status["attempts"][0]["ending"]
    assert (ending["exitCode"], ending["message"]) == (75, "Drained: Eviction API: evicting")
    assert (status["freeRestarts"], status["infraRestarts"]) == (1, 0)


def test_a_pod_that_does_not_hear_is_killed_after_its_grace_period(team: Team) -> None:
    status = team.wait_phase("deaf", "Failed")
    ending = status["attempts"][0]["ending"]
    assert (ending["reason"], ending["exitCode"]) == ("Killed", 137)
    assert "before it could checkpoint" in ending["message"]


def test_a_pod_that_stays_after_it_ended_holds_nobody_up(team: Team) -> None:
    """The process is gone, and that is what counts."""
    assert team.wait_phase("held", "Succeeded")["freeRestarts"] == 1
    held = find_pod(team, "held")
    assert held is not None
    assert "deletionTimestamp" in held["metadata"]
    team.server.merge(team.path("pods", held["metadata"]["name"]), {"metadata": {"finalizers": None}})


def test_suspending_frees_the_pod_and_resuming_makes_another(team: Team) -> None:
    status = team.wait_phase("paused", "Suspended")
    assert (status["whoActs"], status["freeRestarts"]) == ("None", 1)
    assert find_pod(team, "paused") is None or find_pod(team, "paused")["status"]["phase"] == "Failed"  # type: ignore[index]
    team.edit_run("paused", lifecycle={"suspend": False})
    assert [each["number"] for each in team.wait_phase("paused", "Succeeded")["attempts"]] == [1, 2]


def test_a_run_deleted_while_it_runs_takes_everything_with_it(team: Team) -> None:
    wait_for_pod(team, "gone-running")
    assert len(list_children(team, "gone-running")) == 4
    team.server.delete(team.path("orbitruns", "gone-running"))
    wait_for(lambda: not list_children(team, "gone-running"), "everything of it goes")


def test_a_run_deleted_while_it_is_suspended_takes_everything_with_it(team: Team) -> None:
    team.wait_phase("gone-suspended", "Suspended")
    assert list_children(team, "gone-suspended")
    team.server.delete(team.path("orbitruns", "gone-suspended"))
    wait_for(lambda: not list_children(team, "gone-suspended"), "everything of it goes")


def test_pods_that_hang_lie_or_flood_are_not_believed_and_cost_no_other_run_its_news(team: Team) -> None:
    for name in ("honest", "hangs", "lies", "floods"):
        wait_for_pod(team, name)
    before = team.wait_phase("honest", "Running")["step"]
    wait_for(lambda: team.status("honest")["step"] >= before + 5, "the honest one's steps are seen", 60)
    lies = team.status("lies")
    assert lies["step"] == 0
    assert not {"checkpoint", "secondsLeft", "execution", "reward"} & set(lies), lies
    assert len(lies.get("adapterDigest", "")) <= 128
    for name in ("hangs", "floods"):
        status = team.status(name)
        assert (status["phase"], status["reason"], status["attempt"]) == ("Starting", "ModelLoading", 1)
        assert "lastReportTime" not in status


def test_a_secret_that_is_missing_is_named_and_once_it_is_there_the_pod_starts(
    team: Team, befallen: dict[str, Any]
) -> None:
    status = befallen["no-secret"]
    assert status["whoActs"] == "User"
    assert 'secret "made-later" not found' in status["message"]
    assert team.wait_phase("no-secret", "Running")["attempt"] == 1


def test_a_config_map_that_is_missing_is_named_and_once_it_is_there_the_pod_starts(
    team: Team, befallen: dict[str, Any]
) -> None:
    status = befallen["no-config-map"]
    assert status["whoActs"] == "User"
    assert 'configmap "made-later" not found' in status["message"]
    assert team.wait_phase("no-config-map", "Running")["attempt"] == 1


def test_nothing_was_ever_started_twice(shared: Stories) -> None:
    """After all of it: no pass failed for a reason of ours, and the operator is well."""
    team, operator = shared.team, shared.operator
    time.sleep(1)
    assert operator.process.poll() is None
    assert "Traceback" not in operator.text, operator.text[-3000:]
    for run in team.server.items(team.path("orbitruns")):
        attempts: list[Any] = run["status"]["attempts"]
        assert len({each["jobUID"] for each in attempts}) == len(attempts)
