"""What can happen to a run, with the operator as a process against a real API server and the real Job controller."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.bed.control_plane import ControlPlane
from cluster.by_hand import Object, Server, Team, connect, open_team, set_ready, wait_for
from cluster.operator_process import Operator, run_operator

from orbit_operator.lease import CLAIM

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(control_plane: ControlPlane) -> Server:
    return connect(control_plane.kubeconfig)


@pytest.fixture(scope="module")
def shared(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Team, Operator]]:
    """One namespace and one operator for every fault that is not the operator's own."""
    folder = tmp_path_factory.mktemp("operator")
    fast = {"ORBIT_OPERATOR_NODE_LOST_SECONDS": "3"}
    with open_team(server, "faults") as team, run_operator(team, folder / "operator.log", **fast) as operator:
        yield team, operator


@pytest.fixture
def team(shared: tuple[Team, Operator]) -> Team:
    team, _ = shared
    team.exits, team.exits_when_deleted, team.lost_nodes = {}, 75, set()
    return team


def condition(status: Object, kind: str) -> Object:
    (found,) = [each for each in status["conditions"] if each["type"] == kind]
    return found


def running_pod(team: Team, run: str) -> Object:
    def probe() -> Object | None:
        pods = [pod for pod in team.pods() if pod["metadata"]["labels"]["orbitrl.dev/run-name"] == run]
        return next((pod for pod in pods if pod["status"].get("phase") == "Running"), None)

    return wait_for(probe, f"{run} has a pod that runs")


@pytest.mark.parametrize(
    ("code", "reason", "owner", "result"),
    [
        (0, "Succeeded", "None", "Succeeded"),
        (64, "ValidationFailed", "User", "Failed"),
        (70, "InternalError", "Orbit", "Failed"),
    ],
)
def test_an_ending_that_is_final(team: Team, code: int, reason: str, owner: str, result: str) -> None:
    name = f"final-{code}"
    team.exits = {1: code}
    team.start_run(name)
    status = team.wait_phase(name, "Succeeded", "Failed")
    assert (status["phase"], status["reason"], status["whoActs"]) == (result, reason, owner)
    assert condition(status, "Complete" if code == 0 else "Failed")["status"] == "True"
    assert len([job for job in team.jobs() if job.startswith(f"{name}-a")]) == 1


def test_a_run_that_does_not_fit_its_gpus_gets_no_pod(team: Team) -> None:
    """Kimi-K2.6 on eight H100: the condition has the number. DeepSeek-V4-Flash: no trainer here divides it."""
    model = {"uri": "hf://moonshotai/Kimi-K2.6", "precision": "INT4"}
    attention = ["q_a_proj", "kv_a_proj_with_mqa", "o_proj"]
    adapter = {"type": "LoRA", "targets": [*attention, "gate_proj", "up_proj", "down_proj"]}
    model |= {"maxSequenceLength": 16384}
    asked = {"model": model, "adapter": adapter}
    team.start_run("too-big", **asked, placement={"gpus": 8, "gpuProduct": "NVIDIA-H100-80GB-HBM3"})
    status = team.wait_phase("too-big", "Failed")
    assert (status["reason"], status["whoActs"]) == ("DoesNotFit", "User")
    refused = condition(status, "PlanAccepted")
    assert (refused["status"], refused["reason"]) == ("False", "DoesNotFit")
    assert "one H100 has 79.1" in refused["message"]
    flash = {"uri": "hf://deepseek-ai/DeepSeek-V4-Flash", "precision": "MXFP4", "maxSequenceLength": 16384}
    rotated = {"type": "OFT", "oft": {"blockSize": 32}, "targets": ["q_a_proj", "gate_proj", "up_proj"]}
    rotated |= {"experts": "Shared"}
    placement = {"gpus": 8, "gpuProduct": "NVIDIA-H100-80GB-HBM3"}
    team.start_run("too-early", model=flash, adapter=rotated, placement=placement)
    status = team.wait_phase("too-early", "Failed")
    assert (status["reason"], status["whoActs"]) == ("NotInThisVersion", "User")
    team.start_run("fits", placement={"gpus": 1, "gpuProduct": "NVIDIA-B200"})
    wait_for(lambda: "fits-a1" in team.jobs(), "the Job of the run that fits")
    wait_for(lambda: team.status("fits").get("conditions"), "its status")
    accepted = condition(team.status("fits"), "PlanAccepted")
    assert (accepted["status"], accepted["reason"]) == ("True", "Fits")
    assert not [job for job in team.jobs() if job.startswith(("too-big-a", "too-early-a"))]


@pytest.mark.parametrize("code", [74, 79, 139])
def test_an_ending_that_the_infrastructure_pays_for(team: Team, code: int) -> None:
    name = f"infra-{code}"
    team.exits = {1: code, 2: 0}
    team.start_run(name)
    status = team.wait_phase(name, "Restarting")
    assert status["nextAttemptTime"]
    assert condition(status, "Interrupted")["status"] == "True"
    assert (status["infraRestarts"], status["userRetries"]) == (1, 0)
    assert status["attempts"][0]["ending"]["exitCode"] == code


def test_a_manifest_that_no_config_map_can_hold_never_starts_and_says_so(team: Team) -> None:
    """The API server takes up to 1.5 MB; what a reward's arguments hold is not for the schema to count."""
    rewards = [{"name": "r", "type": "Math", "arguments": {"prompts": "12+34=ü\n" * 120_000}}]
    team.start_run("huge", environment={"rewards": rewards})
    status = team.wait_phase("huge", "Failed")
    assert (status["reason"], status["whoActs"]) == ("ValidationFailed", "User")
    assert "1048576" in status["message"]
    assert "huge-a1" not in team.jobs()


def test_after_its_back_off_a_run_goes_on_and_ends_well(team: Team) -> None:
    team.exits = {1: 82, 2: 0}
    team.start_run("resumed")
    status = team.wait_phase("resumed", "Succeeded")
    assert [each["ending"]["result"] for each in status["attempts"]] == ["Failed", "Succeeded"]


def test_the_infra_budget_ends(team: Team) -> None:
    team.exits = {1: 82}
    team.start_run("broke", lifecycle={"maxInfraRestarts": 0})
    status = team.wait_phase("broke", "Failed")
    assert (status["reason"], status["whoActs"]) == ("InfraRestartsExhausted", "Cluster")


def test_a_pod_deleted_by_hand_checkpoints_and_the_run_goes_on(team: Team) -> None:
    team.start_run("by-hand")
    pod = running_pod(team, "by-hand")
    team.exits = {2: 0}
    team.server.delete(team.path("pods", pod["metadata"]["name"]))
    status = team.wait_phase("by-hand", "Succeeded")
    assert (status["freeRestarts"], status["infraRestarts"]) == (1, 0)


def test_a_job_deleted_by_hand_is_an_attempt_that_ended(team: Team) -> None:
    team.start_run("no-job")
    running_pod(team, "no-job")
    team.exits = {2: 0}
    team.server.delete(team.path("jobs", "no-job-a1"))
    team.wait_phase("no-job", "Succeeded")
    assert "no-job-a2" in team.jobs()
    assert "no-job-a1" not in team.jobs()


def test_a_node_that_is_lost_is_left_and_its_zombie_never_counts(team: Team) -> None:
    team.start_run("zombie")
    pod = running_pod(team, "zombie")
    node = pod["spec"]["nodeName"]
    wait_for(lambda: team.status("zombie").get("node") == node, "the node is known")
    team.lost_nodes = {node}
    set_ready(team.server, node, False)
    # What the node controller does when a node stops answering.
    team.server.merge(
        team.path("pods", pod["metadata"]["name"], "status"),
        {"status": {"conditions": [{"type": "Ready", "status": "False", "reason": "NodeLost"}]}},
    )
    wait_for(lambda: len(team.status("zombie").get("attempts", ())) == 2, "a second attempt")
    status = team.status("zombie")
    assert status["attempts"][0]["ending"]["reason"] == "NodeLost"
    second = running_pod_of(team, "zombie", 2)
    assert second["spec"]["nodeName"] != node
    avoided = second["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert avoided[0]["preference"]["matchExpressions"][0]["values"] == [node]
    set_ready(team.server, node, True)
    team.lost_nodes = set()
    time.sleep(1.0)
    assert len(team.status("zombie")["attempts"]) == 2
    assert team.status("zombie")["attempts"][0]["ending"]["reason"] == "NodeLost"


def running_pod_of(team: Team, run: str, attempt: int) -> Object:
    def probe() -> Object | None:
        for pod in team.pods():
            labels = pod["metadata"]["labels"]
            mine = labels["orbitrl.dev/run-name"] == run and labels["orbitrl.dev/attempt"] == str(attempt)
            if mine and pod["status"].get("phase") == "Running":
                return pod
        return None

    return wait_for(probe, f"attempt {attempt} of {run} runs")


def test_a_quota_that_is_used_up_is_said_to_be_the_reason(team: Team, server: Server) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"},
             "spec": {"hard": {"requests.nvidia.com/gpu": "0"}}}  # fmt: skip
    server.apply(team.path("resourcequotas", "none"), quota)
    wait_for(lambda: (server.get(team.path("resourcequotas", "none")) or {}).get("status", {}).get("hard"), "the quota")
    try:
        team.start_run("no-quota", placement={"gpus": 8})
        wait_for(lambda: team.status("no-quota").get("reason") == "QuotaExceeded", "the reason")
        status = team.status("no-quota")
        assert status["whoActs"] == "Cluster"
        assert "exceeded quota" in status["message"]
    finally:
        server.delete(team.path("resourcequotas", "none"))


def test_a_queue_holds_a_run_until_it_lets_it_go(team: Team) -> None:
    team.start_run("queued", lifecycle={"queueName": "team-queue"})
    status = team.wait_phase("queued", "Queued")
    assert condition(status, "Admitted")["status"] == "False"
    team.exits = {1: 0}
    team.server.merge(team.path("jobs", "queued-a1"), {"spec": {"suspend": False}})
    team.wait_phase("queued", "Succeeded")


def test_a_run_that_is_suspended_before_it_has_a_pod_makes_none(team: Team) -> None:
    team.start_run("held", lifecycle={"queueName": "team-queue"})
    team.wait_phase("held", "Queued")
    team.edit_run("held", lifecycle={"suspend": True})
    status = team.wait_phase("held", "Suspended")
    assert status["freeRestarts"] == 1
    assert "held-a1" not in team.jobs()


def test_a_deleted_run_takes_everything_with_it(team: Team) -> None:
    team.start_run("gone")
    running_pod(team, "gone")
    team.server.delete(team.path("orbitruns", "gone"))
    wait_for(lambda: "gone-a1" not in team.jobs(), "the Job goes")
    wait_for(lambda: team.server.get(team.path("configmaps", "gone-manifest")) is None, "its ConfigMap goes")


def test_a_cleanup_that_fails_lets_the_run_go_and_says_what_stays(team: Team) -> None:
    """Credentials that were taken away do not come back by trying again: the first pod that says so is the last."""
    team.exits = {1: 0}
    team.start_run("kept", storage={"uri": "s3://runs", "deletionPolicy": "Delete"})
    team.wait_phase("kept", "Succeeded")
    began = time.monotonic()
    team.server.delete(team.path("orbitruns", "kept"))

    def find_pod() -> Object | None:
        cleanup = "app.kubernetes.io/component=cleanup"
        found = team.server.items(team.path("pods"), labelSelector=cleanup)
        return next((pod for pod in found if pod["status"]["phase"] == "Running"), None)

    team.end(wait_for(find_pod, "the cleanup runs"), 77, "error: 403 Forbidden\n  where: s3://runs/kept\n")
    wait_for(lambda: team.server.get(team.path("orbitruns", "kept")) is None, "the run is gone", 30)
    assert time.monotonic() - began < 60
    said = [event for event in team.server.items(team.path("events")) if event["reason"] == "ArtifactCleanupFailed"]
    assert [(each["type"], each["message"]) for each in said] == [
        ("Warning", "what was not deleted stays in s3://runs/kept, and there are no more tries: "
                    "error: 403 Forbidden where: s3://runs/kept")
    ]  # fmt: skip


def test_a_name_used_again_waits_for_the_pods_of_its_former_run(team: Team) -> None:
    team.start_run("twice")
    pod = running_pod(team, "twice")
    team.lost_nodes = {pod["spec"]["nodeName"]}
    team.server.delete(team.path("orbitruns", "twice"))
    wait_for(lambda: "twice-a1" not in team.jobs(), "its Job goes")
    team.start_run("twice")
    wait_for(lambda: team.status("twice").get("reason") == "FormerRunEnding", "the new one waits")
    assert "twice-a1" not in team.jobs()
    team.lost_nodes = set()
    wait_for(lambda: "twice-a1" in team.jobs(), "the new one starts")


def test_time_to_live_deletes_the_run(team: Team) -> None:
    team.exits = {1: 0}
    team.start_run("short", lifecycle={"ttlSecondsAfterFinished": 1})
    wait_for(lambda: "short-a1" in team.jobs(), "the Job")
    wait_for(lambda: team.server.get(team.path("orbitruns", "short")) is None, "the run goes away")


def test_an_answer_of_409_429_or_500_to_an_eighth_of_all_calls_changes_nothing(server: Server, tmp_path: Path) -> None:
    with (
        open_team(server, "flaky") as team,
        run_operator(team, tmp_path / "flaky.log", ORBIT_TEST_FAULTS="409,429,500") as operator,
    ):
        team.exits = {2: 0}
        team.start_run("adder")
        try:
            running_pod(team, "adder")
        except AssertionError as error:
            raise AssertionError(f"{error}; {operator.text[-4000:]}") from None
        team.edit_run("adder", lifecycle={"suspend": True})
        team.wait_phase("adder", "Suspended")
        team.edit_run("adder", lifecycle={"suspend": False})
        status = team.wait_phase("adder", "Succeeded")
        assert [each["ending"]["result"] for each in status["attempts"]] == ["Stopped", "Succeeded"]
        assert max(len(pods) for pods in team.history) == 1


def test_what_happened_while_no_operator_was_there_is_found_out(server: Server, tmp_path: Path) -> None:
    with open_team(server, "absent") as team:
        with run_operator(team, tmp_path / "one.log") as operator:
            team.start_run("ends")
            team.start_run("fails")
            running_pod(team, "ends")
            running_pod(team, "fails")
            wait_for(lambda: team.status("fails").get("node"), "both are known")
            assert operator.stop() == 0
        for name, code in (("ends", 0), ("fails", 65)):
            team.end(running_pod(team, name), code)
        team.start_run("starts")
        wait_for(lambda: len(team.jobs()) == 2, "nothing acts")
        with run_operator(team, tmp_path / "two.log"):
            assert team.wait_phase("ends", "Succeeded")["reason"] == "Succeeded"
            assert team.wait_phase("fails", "Failed")["reason"] == "DataUnusable"
            running_pod(team, "starts")


def test_of_two_operators_one_acts_and_the_other_takes_over(server: Server, tmp_path: Path) -> None:
    lease = {"ORBIT_OPERATOR_LEASE_SECONDS": "6"}
    with open_team(server, "two") as team:
        first = Operator(team, tmp_path / "first.log", ORBIT_OPERATOR_IDENTITY="first", **lease)
        path = f"/apis/coordination.k8s.io/v1/namespaces/{team.namespace}/leases/orbit-operator"

        def holder() -> Any:
            return ((server.get(path) or {}).get("spec") or {}).get("holderIdentity")

        try:
            wait_for(lambda: holder() == "first", "the first has the Lease")
            with run_operator(team, tmp_path / "second.log", ORBIT_OPERATOR_IDENTITY="second", **lease) as second:
                team.start_run("adder")
                running_pod(team, "adder")
                assert holder() == "first"
                # Stopped like a machine that hangs: it neither renews nor gives back.
                first.process.send_signal(signal.SIGSTOP)
                wait_for(lambda: holder() == "second", "the second takes over")
                team.exits = {1: 0}
                team.wait_phase("adder", "Succeeded")
                first.process.send_signal(signal.SIGCONT)
                assert first.process.wait(30) == 75
                assert "this operator stops acting" in first.text
                assert second.process.poll() is None
                assert team.jobs() == ["adder-a1"]
        finally:
            if first.process.poll() is None:
                first.kill()


def test_of_two_installations_that_watch_one_namespace_one_acts_and_the_other_says_so(
    server: Server, tmp_path: Path
) -> None:
    with open_team(server, "owned") as team, run_operator(team, tmp_path / "first.log"):
        path = f"/apis/coordination.k8s.io/v1/namespaces/{team.namespace}/leases/{CLAIM}"
        team.start_run("adder")
        running_pod(team, "adder")
        other = {"ORBIT_OPERATOR_LEASE_NAME": "other", "ORBIT_OPERATOR_TTL_SECONDS": "0"}
        with run_operator(team, tmp_path / "second.log", **other) as second:
            wait_for(lambda: f"owns the runs of namespace {team.namespace}" in second.text, "the second says so")
            team.exits = {1: 0}
            team.wait_phase("adder", "Succeeded")
            assert (server.get(path) or {})["spec"]["holderIdentity"] == f"{team.namespace}/orbit-operator"
            assert second.process.poll() is None
            assert team.status("adder"), "the second would have deleted it"


def test_a_signal_ends_the_operator_soon_and_gives_the_lease_back(server: Server, tmp_path: Path) -> None:
    with open_team(server, "ends") as team:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{team.namespace}/leases/orbit-operator"
        made = {
            "labels": {"app.kubernetes.io/managed-by": "Helm"},
            "annotations": {"meta.helm.sh/release-name": "orbit"},
        }
        head = {"name": "orbit-operator", **made}
        server.create(
            path.rpartition("/")[0], {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": head}
        )
        with run_operator(team, tmp_path / "ends.log") as operator:
            team.start_run("adder")
            running_pod(team, "adder")
            began = time.monotonic()
            assert operator.stop() == 0
            assert time.monotonic() - began < 25
        lease = server.get(path)
        assert lease is not None
        assert lease["spec"]["holderIdentity"] == ""
        assert {name: lease["metadata"].get(name) for name in made} == made


def test_an_api_server_that_starts_anew_loses_nothing(
    server: Server, control_plane: ControlPlane, tmp_path: Path
) -> None:
    with open_team(server, "restart") as team, run_operator(team, tmp_path / "restart.log") as operator:
        team.start_run("before")
        running_pod(team, "before")
        control_plane.stop_api_server()
        time.sleep(3)
        control_plane.start_api_server()
        wait_for(lambda: running_pod(team, "before"), "the API server answers")
        if operator.process.poll() is not None:
            # Away for longer than the Lease holds: it must end, and its Deployment starts it anew.
            assert operator.process.returncode == 75
            operator = Operator(team, tmp_path / "restart.log")
        try:
            team.exits = {1: 0}
            team.start_run("after")
            team.wait_phase("before", "Succeeded")
            team.wait_phase("after", "Succeeded")
            assert max(team.jobs().count(job) for job in team.jobs()) == 1
            assert team.jobs() == ["after-a1", "before-a1"]
        finally:
            if operator.process.poll() is None:
                operator.kill()
