"""A run over several nodes: its RayCluster, when it is made and when it goes, and who may speak to whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import orjson
import pytest

pytest.importorskip("kopf", reason="the operator's packages are not installed (extra `operator`)")

from unit_operator.cluster_model import build_cluster, work
from unit_operator.test_manifests import LARGE, SETTINGS, SMALL, source

from orbit_operator.actions import CreateAttempt, CreateRanks, DeleteRanks, State
from orbit_operator.api import ApiError
from orbit_operator.apply import NameTakenError, explain_refusal
from orbit_operator.cache import Cache, Child, RawRun
from orbit_operator.facts import ContainerEnd, PodFacts, QueueFacts
from orbit_operator.manifests.job import build_job
from orbit_operator.manifests.network_policy import build_network_policy
from orbit_operator.manifests.ray_cluster import build_ray_cluster
from orbit_operator.manifests.source import ranks_name, ray_address
from orbit_operator.observe import Observer, judge_manifest
from orbit_operator.read import read_ranks

FLAGSHIP: dict[str, Any] = {
    **LARGE,
    "placement": {**LARGE["placement"], "layout": "Colocated", "gpus": 8, "nodes": 3},
    "lifecycle": {},
}


def test_nodes_are_taken_with_the_attempt_and_given_back_when_its_pod_has_ended() -> None:
    cluster = build_cluster(nodes=3, max_infra_restarts=3)
    assert work(cluster).actions == (CreateRanks(1),)
    assert work(cluster).actions == (), "once"
    cluster.place_ranks()
    assert [type(each) for each in work(cluster).actions] == [CreateAttempt]
    cluster.run_pod()
    assert work(cluster).actions == ()
    cluster.exit(81)
    cluster.conclude_jobs()
    given_back = work(cluster)
    assert [each for each in given_back.actions if isinstance(each, DeleteRanks)] != []
    assert not cluster.ranks
    cluster.wait(3600)
    work(cluster)
    cluster.place_ranks()
    work(cluster)
    assert [each.attempt for each in cluster.ranks.values()] == [2], "the next attempt has nodes of its own"


def test_the_runs_pod_takes_no_gpus_before_its_ranks_are_placed_and_the_run_says_what_they_wait_for() -> None:
    cluster = build_cluster(nodes=3)
    work(cluster)
    cluster.place_ranks()
    last = max(cluster.rank_pods)
    placed = cluster.rank_pods[last]
    unplaced = replace(placed, node="", phase="Pending", unschedulable="5 Insufficient nvidia.com/gpu")
    for _ in range(3):
        cluster.rank_pods[last] = unplaced
        assert work(cluster).actions == ()
        assert [cluster.status[name] for name in ("phase", "reason", "whoActs")] == [
            "Pending", "Unschedulable", "Cluster",
        ]  # fmt: skip
        assert last in cluster.status["message"]
        cluster.wait(3600)
    assert (cluster.jobs, cluster.status["attempt"], cluster.status["infraRestarts"]) == ({}, 0, 0)
    assert cluster.status["gpuSeconds"] == {"useful": 0, "lost": 0, "waiting": 0}
    cluster.rank_pods[last] = placed
    assert work(cluster).actions == (CreateAttempt(1),)


def test_ranks_whose_pods_a_quota_refuses_are_told_in_its_words_and_go_when_the_run_is_suspended() -> None:
    cluster = build_cluster(nodes=2)
    work(cluster)
    (uid,) = cluster.ranks
    said = "pods is forbidden: exceeded quota: gpus"
    cluster.ranks[uid] = replace(cluster.ranks[uid], problem=said)
    assert work(cluster).wake_at is not None, "RayClusters are not watched"
    assert [cluster.status[name] for name in ("reason", "message", "whoActs")] == ["QuotaExceeded", said, "Cluster"]
    body = {
        "metadata": {"name": "r", "uid": "u"},
        "status": {"conditions": [{"type": "ReplicaFailure", "message": said}]},
    }
    assert read_ranks(body).problem == said
    cluster.suspend(True)
    assert work(cluster).actions == (DeleteRanks(uid, uid),)


UNPLACED = PodFacts("ranks-adder-a1-x", "r1", 0, unschedulable="0/3 nodes: 5 Insufficient nvidia.com/gpu")
NO_IMAGE = PodFacts("ranks-adder-a1-x", "r1", 0, waiting_reason="ErrImagePull", waiting_message="no such image")
OUT_OF_MEMORY = PodFacts("ranks-adder-a1-x", "r1", 0, phase="Failed", end=ContainerEnd(137, "OOMKilled", finished=1.0))


@pytest.mark.parametrize(
    ("pod", "state", "ending", "budget"),
    [
        (UNPLACED, ("Unschedulable", "Cluster"), ("Unschedulable", "Cluster"), "Free"),
        (NO_IMAGE, ("ImagePullFailed", "User"), ("ImagePullFailed", "User"), "Infra"),
        (OUT_OF_MEMORY, ("ModelLoading", "None"), ("OutOfMemory", "User"), "Infra"),
    ],
)
def test_what_pods_of_ranks_wait_for_is_what_the_run_waits_for(
    pod: PodFacts, state: tuple[str, str], ending: tuple[str, str], budget: str
) -> None:
    cluster = build_cluster(nodes=3)
    work(cluster)
    cluster.place_ranks()
    work(cluster)
    cluster.run_pod()
    observed = replace(cluster.observe(), rank_pods=(pod,))
    cluster.write_status(observed, cluster.think(observed))
    assert (cluster.status["reason"], cluster.status["whoActs"]) == state
    cluster.exit(81)
    cluster.conclude_jobs()
    observed = replace(cluster.observe(), rank_pods=(pod,))
    cluster.write_status(observed, cluster.think(observed))
    (attempt,) = cluster.status["attempts"]
    assert (attempt["ending"]["reason"], attempt["ending"]["whoActs"]) == ending
    assert (attempt["ending"]["budget"], attempt["ending"]["exitCode"]) == (budget, 81)
    assert pod.name in attempt["ending"]["message"]


def test_somebody_deletes_the_ray_cluster_of_a_run_that_lives() -> None:
    cluster = build_cluster(nodes=2)
    work(cluster)
    cluster.place_ranks()
    work(cluster)
    cluster.ranks.clear()
    assert work(cluster).actions == (CreateRanks(1),)


def test_without_kuberay_no_attempt_is_made() -> None:
    cluster = build_cluster(nodes=2)
    chosen = cluster.think(replace(cluster.observe(), ranks_problem="install KubeRay"))
    assert chosen.actions == ()
    assert chosen.state is not None
    said = (chosen.state.phase, chosen.state.reason, chosen.state.message, chosen.state.owner)
    assert said == ("Pending", "RanksUnavailable", "install KubeRay", "cluster")
    assert chosen.wake_at is not None, "it is looked for again"


def test_in_a_queue_ranks_are_admitted_first_then_the_runs_pod_and_the_run_says_what_it_waits_for() -> None:
    cluster = build_cluster(nodes=3, queue_name="team-queue")
    assert work(cluster).actions == (CreateRanks(1),)
    cluster.place_ranks()
    assert not cluster.rank_pods, "the queue holds the RayCluster"
    waits = work(cluster)
    assert (waits.actions, waits.wake_at is None) == ((), False), "RayClusters are not watched"
    no_room = replace(cluster.observe(), queue=QueueFacts("Pending", "16 GPUs more needed"))
    cluster.write_status(no_room, cluster.think(no_room))
    assert [cluster.status[name] for name in ("phase", "reason", "message", "whoActs")] == [
        "Queued", "QueuedByKueue", "16 GPUs more needed", "Cluster",
    ]  # fmt: skip
    (admitted,) = (each for each in cluster.status["conditions"] if each["type"] == "Admitted")
    assert (admitted["status"], admitted["reason"]) == ("False", "Pending")
    cluster.hold(False)
    cluster.place_ranks()
    assert work(cluster).actions == (CreateAttempt(1),)
    work(cluster)
    assert cluster.status["phase"] == "Queued", "its Job is admitted apart from its ranks"
    cluster.hold(False)
    cluster.run_pod()
    work(cluster)
    cluster.hold_ranks(True)
    cluster.exit(81)
    cluster.conclude_jobs()
    work(cluster)
    (attempt,) = cluster.status["attempts"]
    assert [attempt["ending"][name] for name in ("reason", "whoActs", "budget")] == ["Preempted", "Cluster", "Free"]
    assert cluster.status["infraRestarts"] == 0


def test_kueue_is_asked_for_held_ranks_and_a_rank_that_no_scheduler_looks_at_is_seen() -> None:
    ranks = {
        "metadata": {"name": "ranks-adder-a1", "uid": "c", "labels": {"orbitrl.dev/attempt": "1"}},
        "spec": {"suspend": True},
    }
    workload = {"status": {"conditions": [{"type": "QuotaReserved", "status": "False", "message": "no room"}]}}
    asked = []

    class Lists:
        async def list(self, kind: Any, _: str, selector: dict[str, str]) -> AsyncIterator[dict[str, Any]]:
            asked.append(selector["labelSelector"])
            yield workload if "kueue" in str(kind) else ranks

    cache, key = Cache(), ("team", "adder")
    head = {"namespace": "team", "name": "adder", "uid": "r"}
    body = orjson.dumps({"metadata": head, "spec": {"placement": {"nodes": 3}}})
    cache.runs.put(key, "r", RawRun("r", body, "1"), 1)
    cache.pods.put(key, "p", Child("r", PodFacts("ranks-adder-a1-0", "p", 0, "c", created=1.0)), 1)
    found = asyncio.run(Observer(Lists(), cache, "team-queue").look(key, 60.0))  # type: ignore[arg-type]
    assert found is not None
    assert (found[2].ranks_problem, found[2].queue) == ("", QueueFacts("QuotaReserved", "no room"))
    assert asked[-1] == "kueue.x-k8s.io/job-uid=c"
    assert ["no scheduler" in pod.unschedulable for pod in found[2].rank_pods] == [True]


def test_a_ray_cluster_and_its_job_name_the_manifests_queue_or_the_installations() -> None:
    for lifecycle, settings, queue in (
        ({"queueName": "team"}, SETTINGS, "team"),
        ({}, replace(SETTINGS, run_queue="all"), "all"),
        ({"queueName": "team"}, replace(SETTINGS, run_queue="all"), "team"),
        ({}, SETTINGS, None),
    ):
        run = source({**FLAGSHIP, "lifecycle": lifecycle})
        for made in (build_ray_cluster(run, 1, settings), build_job(run, 1, (), settings)):
            assert made["metadata"]["labels"].get("kueue.x-k8s.io/queue-name") == queue
            assert made["spec"]["suspend"] is (queue is not None)


def test_a_ray_cluster_that_is_refused_is_told() -> None:
    told = explain_refusal(
        CreateRanks(2), ApiError(422, "Invalid", "spec.headGroupSpec"), State("Pending", "PodPending")
    )
    assert told is not None
    assert (told.reason, told.message) == (
        "AttemptRefused", "the RayCluster of attempt 2 cannot be created: spec.headGroupSpec",
    )  # fmt: skip


def test_a_ray_cluster_of_that_name_which_is_somebody_elses_is_not_joined() -> None:
    taken = NameTakenError("RayCluster ranks-adder-a1 exists and is not this run's")
    told = explain_refusal(CreateRanks(1), taken, State("Pending", "PodPending"))
    assert told is not None
    assert (told.reason, told.message, told.owner) == ("NameTaken", f"{taken}; delete it", "user")


def test_the_ray_cluster_has_whole_nodes_for_ranks_and_none_of_the_stores_keys() -> None:
    run = source({**FLAGSHIP, "storage": {"uri": "s3://runs/team", "credentialsSecretName": "store"}})
    made = build_ray_cluster(run, 4, SETTINGS)
    (workers,) = made["spec"]["workerGroupSpecs"]
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (2, 2, 2)
    pod = workers["template"]["spec"]
    (ranks,) = pod["containers"]
    assert ranks["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert workers["rayStartParams"]["num-gpus"] == "8"
    assert ranks["envFrom"] == [{"secretRef": {"name": "hub-token"}}], "not the store's"
    assert pod["automountServiceAccountToken"] is False
    assert ranks["securityContext"]["readOnlyRootFilesystem"] is True
    assert {"name": "cache", "persistentVolumeClaim": {"claimName": "model-cache"}} in pod["volumes"]
    mounted = {each["mountPath"] for each in ranks["volumeMounts"]}
    job = build_job(run, 4, (), SETTINGS)["spec"]["template"]["spec"]
    (own,) = job["containers"]
    assert mounted == {each["mountPath"] for each in own["volumeMounts"]} - {"/etc/orbit"}, (
        "the model, where the run has it"
    )
    assert ranks["image"] == own["image"], "one version of Ray and of Python"
    assert own["resources"]["limits"]["nvidia.com/gpu"] == "8", "the engine's"
    assert {"name": "RAY_ADDRESS", "value": "ranks-adder-a4-head-svc:6379"} in own["env"]
    head = made["spec"]["headGroupSpec"]
    assert head["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0", "include-dashboard": "false"}
    (daemons,) = head["template"]["spec"]["containers"]
    assert "nvidia.com/gpu" not in daemons["resources"]["limits"]
    assert made["metadata"]["ownerReferences"] == build_job(run, 4, (), SETTINGS)["metadata"]["ownerReferences"]


def test_pods_of_several_nodes_speak_among_themselves_and_those_of_one_do_not() -> None:
    policy = build_network_policy(source(FLAGSHIP), SETTINGS)["spec"]
    among = [{"podSelector": policy["podSelector"]}]
    assert {"from": among} in policy["ingress"]
    assert {"to": among} in policy["egress"]
    labels = build_ray_cluster(source(FLAGSHIP), 1, SETTINGS)["spec"]["workerGroupSpecs"][0]["template"]["metadata"][
        "labels"
    ]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert "orbitrl.dev/attempt" not in labels, "else a rank's pod would be taken for the run's"
    assert "podSelector" not in str(build_network_policy(source(SMALL), SETTINGS)["spec"]["ingress"])


@pytest.mark.parametrize("attempt", [1, 12, 123])
@pytest.mark.parametrize(
    "run", ["a", "0-adder", "x" * 52, "a-very-long-name-of-a-run-that-is-the-first", "y" * 21 + ".z"]
)
def test_names_are_what_kuberay_leaves_as_they_are(run: str, attempt: int) -> None:
    name = ranks_name(run, attempt)
    assert name[0].isalpha()
    assert len(f"{name}-head-svc") <= 50
    assert name != ranks_name(f"{run}b", attempt)
    assert name != ranks_name(run, attempt + 1)
    assert ray_address(run, attempt) == f"{name}-head-svc:6379"


@pytest.mark.parametrize(
    ("model", "cache", "is_good"),
    [
        ("hf://Qwen/Qwen3-0.6B", {}, False),
        ("hf://Qwen/Qwen3-0.6B", {"claimName": "models"}, True),
        ("pvc://models/qwen", {}, True),
        ("builtin://tiny-adder", {}, False),
    ],
)
def test_every_node_must_find_the_model(model: str, cache: dict[str, str], is_good: bool) -> None:
    placement = {"gpus": 0, "nodes": 2, "modelCache": cache}
    spec = {**SMALL, "model": {"uri": model}, "placement": placement}
    body = {"metadata": {"name": "adder", "namespace": "team", "uid": "u"}, "spec": spec}
    assert ("modelCache.claimName" in judge_manifest(body).invalid) is not is_good
