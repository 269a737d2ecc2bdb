"""The API server refuses what an attempt needs: the run says why, and goes on by itself once it is allowed."""

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
