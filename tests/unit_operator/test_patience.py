"""What nobody tells us of is looked at again, soon and then less and less often."""

from __future__ import annotations

from dataclasses import replace

import pytest
from unit_operator.cluster_model import build_cluster, work

from orbit_operator.facts import JobFacts, PodFacts, Progress
from orbit_operator.plan import plan
from orbit_operator.policies.requeue import look_again, tell_unseen

JOB = JobFacts("adder-a1", "j", 1, created=100.0)
CREATING = PodFacts("p", "u", 1, node="n0", scheduled=200.0)


def test_a_wait_is_looked_at_less_and_less_often() -> None:
    looks, now = list[float](), 100.0
    for _ in range(4):
        due = look_again(JOB, None, now)
        assert due is not None
        looks.append(due)
        now = due
    assert looks == [110.0, 115.0, 122.5, 133.75]


@pytest.mark.parametrize(
    ("pod", "due"),
    [
        (CREATING, 210.0),
        (PodFacts("p", "u", 1, created=195.0), 205.0),
        (PodFacts("p", "u", 1, unschedulable="8 Insufficient nvidia.com/gpu"), None),
        (PodFacts("p", "u", 1, gates=("example.com/later",)), None),
        (PodFacts("p", "u", 1, node="n0", scheduled=200.0, started=201.0), None),
        (PodFacts("p", "u", 1, node="n0", scheduled=200.0, phase="Failed"), None),
    ],
)
def test_a_pod_is_waited_for_until_the_scheduler_has_seen_it_and_between_its_node_and_its_container(
    pod: PodFacts, due: float | None
) -> None:
    assert look_again(JOB, pod, 200.0) == due


@pytest.mark.parametrize(
    ("pod", "says"),
    [
        (PodFacts("p", "u", 1, created=100.0), "no scheduler"),
        (PodFacts("p", "u", 1, created=195.0), ""),
        (PodFacts("p", "u", 1, created=100.0, unschedulable="no GPUs"), "no GPUs"),
        (PodFacts("p", "u", 1, created=100.0, gates=("example.com/later",)), ""),
        (PodFacts("p", "u", 1, created=100.0, node="n0"), ""),
        (PodFacts("p", "u", 1, created=100.0, phase="Failed"), ""),
    ],
)
def test_a_pod_that_no_scheduler_looks_at_says_so(pod: PodFacts, says: str) -> None:
    """The scheduler is down, or the pod names one that does not exist."""
    assert says in tell_unseen(pod, 200.0).unschedulable
    assert bool(tell_unseen(pod, 200.0).unschedulable) is bool(says)


@pytest.mark.parametrize(
    ("port", "answered", "seconds", "says", "who"),
    [
        (9400, False, 299, "", "None"),
        (9400, False, 301, "has not answered the operator at port 9400", "Cluster"),
        (9400, True, 301, "", "None"),
        (None, False, 301, "metricsPort: -1", "None"),
    ],
)
def test_a_run_whose_pod_the_operator_cannot_hear_says_so(
    port: int | None, answered: bool, seconds: int, says: str, who: str
) -> None:
    cluster = build_cluster()
    cluster.run = replace(cluster.run, metrics_port=port)
    work(cluster)
    cluster.run_pod()
    work(cluster)
    (pod,) = cluster.pods.values()
    cluster.wait(seconds)
    observed = cluster.observe(Progress(cluster.now, pod.uid, "Starting") if answered else None)
    cluster.write_status(observed, cluster.think(observed))
    status = cluster.status
    assert (status["phase"], status["reason"], status["whoActs"]) == ("Starting", "ModelLoading", who)
    assert says in status["message"]
    assert (";" in status["message"]) is bool(says)


def test_without_a_job_there_is_nothing_to_wait_for() -> None:
    assert look_again(None, None, 0.0) is None


def test_a_job_without_a_pod_wakes_the_plan() -> None:
    cluster = build_cluster()
    for action in cluster.think(cluster.observe()).actions:
        cluster.carry_out(action)
    chosen = plan(cluster.run, cluster.observe(), cluster.now, cluster.limits, ("Unknown", "", ""))
    assert chosen.wake_at == cluster.now + 10.0
