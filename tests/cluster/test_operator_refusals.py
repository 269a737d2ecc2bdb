"""What the API server takes of an attempt, and refuses: the run says why, and goes on by itself once it is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.bed.control_plane import ControlPlane
from cluster.by_hand import connect, open_team, wait_for
from cluster.operator_process import run_operator

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def test_a_quota_on_jobs_and_a_job_of_the_same_name_are_told_and_waited_for(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    server = connect(control_plane.kubeconfig)
    with open_team(server, "refused") as team, run_operator(team, tmp_path / "operator.log"):
        quota = team.path("resourcequotas", "none")
        hard = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"},
                "spec": {"hard": {"count/jobs.batch": "0"}}}  # fmt: skip
        server.apply(quota, hard)
        wait_for(lambda: (server.get(quota) or {}).get("status", {}).get("hard"), "the quota counts")
        team.start_run("held")
        status = wait_for(lambda: team.status("held"), "the run says something")
        assert (status["phase"], status["reason"], status["whoActs"]) == ("Pending", "QuotaExceeded", "Cluster")
        assert "count/jobs.batch" in status["message"]
        wait_for(lambda: "FailedToCreateRunAttempt" in team.events(), "an event says so")
        assert "RunAttemptCreated" not in team.events()
        server.delete(quota)
        team.wait_phase("held", "Starting", "Running", seconds=60)
        assert team.events().count("FailedToCreateRunAttempt") == 1

        pod = {"containers": [{"name": "c", "image": "x"}], "restartPolicy": "Never"}
        own = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "mine-a1"},
               "spec": {"suspend": True, "template": {"spec": pod}}}  # fmt: skip
        server.apply(team.path("jobs", "mine-a1"), own)
        team.start_run("mine")
        status = wait_for(lambda: team.status("mine"), "the run says something")
        assert (status["reason"], status["whoActs"]) == ("NameTaken", "User")
        server.delete(team.path("jobs", "mine-a1"))
        team.wait_phase("mine", "Starting", "Running", seconds=60)


RUN_DEFAULTS = {
    "ORBIT_OPERATOR_RUN_NODE_SELECTOR": '{"pool": "any", "zone": "a"}',
    "ORBIT_OPERATOR_RUN_TOLERATIONS": '[{"key": "dedicated", "operator": "Exists"}]',
    "ORBIT_OPERATOR_RUN_EGRESS": '[{"cidr": "169.254.170.23/32", "ports": [80]}]',
    "ORBIT_OPERATOR_RUN_PRIORITY_CLASS": "orbit-training",
    "ORBIT_OPERATOR_RUN_POD_LABELS": '{"azure.workload.identity/use": "true"}',
    "ORBIT_OPERATOR_RUN_POD_ANNOTATIONS": '{"example.com/note": "two words"}',
}


def test_what_an_installation_adds_to_runs_is_taken_and_a_priority_class_that_is_missing_is_named(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    server = connect(control_plane.kubeconfig)
    chosen = "/apis/scheduling.k8s.io/v1/priorityclasses/orbit-training"
    with open_team(server, "added") as team, run_operator(team, tmp_path / "operator.log", **RUN_DEFAULTS):
        team.start_run(
            "adder",
            placement={"nodeSelector": {"pool": "gpu"}},
            storage={"uri": "s3://runs", "deletionPolicy": "Delete"},
        )
        said = wait_for(
            lambda: (found := team.status("adder")).get("reason") == "PodRefused" and found, "it is told", 60
        )
        assert "no PriorityClass with name orbit-training was found" in said["message"]
        server.apply(chosen, {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
                              "metadata": {"name": "orbit-training"}, "value": 7})  # fmt: skip
        try:
            team.wait_phase("adder", "Starting", "Running")
            (pod,) = team.pods()
            assert (pod["spec"]["priority"], pod["spec"]["nodeSelector"]) == (7, {"pool": "gpu", "zone": "a"})
            assert {"key": "dedicated", "operator": "Exists"} in pod["spec"]["tolerations"]
            assert pod["metadata"]["labels"]["azure.workload.identity/use"] == "true"
            assert pod["metadata"]["annotations"]["example.com/note"] == "two words"
            policy = server.get(f"/apis/networking.k8s.io/v1/namespaces/{team.namespace}/networkpolicies/adder")
            assert policy is not None
            to = [{"ipBlock": {"cidr": "169.254.170.23/32"}}]
            assert policy["spec"]["egress"][-1] == {"to": to, "ports": [{"protocol": "TCP", "port": 80}]}
            server.delete(team.path("orbitruns", "adder"))
            find = {"labelSelector": "app.kubernetes.io/component=cleanup"}
            (cleanup,) = wait_for(lambda: server.items(team.path("pods"), **find), "the cleanup has a pod", 60)
            assert (cleanup["spec"]["priority"], cleanup["spec"]["nodeSelector"]) == (0, {"pool": "gpu", "zone": "a"})
            assert cleanup["metadata"]["labels"]["azure.workload.identity/use"] == "true"
        finally:
            server.delete(chosen)
