"""Any order of events, any crash point: what must hold for a run whatever happens to it.

The machine moves a hand-written cluster (`cluster_model`) and lets the real planning act on it through caches that lag,
cut short after any API call.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from unit_operator.cluster_model import Cluster, build_cluster

from orbit_operator.actions import Plan
from orbit_operator.attempts import add_created
from orbit_operator.facts import JobFacts, Observed, PodFacts, Progress
from orbit_operator.plan import needs_fresh_look
from orbit_runtime.spec.status import RunStatus

CODES = (0, 1, 64, 66, 70, 73, 74, 75, 77, 78, 79, 80, 81, 82, 83, 84, 85, 86, 134, 137, 139, 143)
EXAMPLES = int(os.environ.get("ORBIT_TEST_EXAMPLES", "60"))


class AnyOrder(RuleBasedStateMachine):
    """One run. Every rule is something that may happen at any time."""

    cluster: Cluster
    seen_jobs: dict[str, JobFacts]
    seen_pods: dict[str, PodFacts]
    ever_seen: bool = False
    progress: Progress | None = None
    finished: tuple[str, str] | None = None
    newest: int = 0

    @initialize(
        user=st.integers(0, 2),
        infra=st.integers(0, 12),
        queue=st.sampled_from([None, None, "team-queue"]),
        startup=st.sampled_from([None, 40]),
        active=st.sampled_from([None, 300]),
        waiting=st.sampled_from([None, None, 700]),
        nodes=st.sampled_from([1, 1, 3]),
    )
    def begin(
        self, user: int, infra: int, queue: str | None, startup: int | None, active: int | None, waiting: int | None,
        nodes: int,
    ) -> None:  # fmt: skip
        self.cluster = build_cluster(
            nodes=nodes,
            max_user_retries=user,
            max_infra_restarts=infra,
            queue_name=queue,
            startup_deadline_seconds=startup,
            active_deadline_seconds=active,
            waiting_deadline_seconds=waiting,
        )
        self.restart_operator()

    # The operator.

    @rule(crash_after=st.one_of(st.none(), st.integers(0, 3)))
    def operator_works(self, crash_after: int | None) -> None:
        """One pass, cut short after so many API calls, if at all."""
        chosen, observed = self.decide()
        for done, action in enumerate(chosen.actions):
            if crash_after == done:
                return self.restart_operator()
            job = self.cluster.carry_out(action)
            if job is not None and chosen.state is not None:
                # What an API call answers is known at once; watching only brings it later.
                self.seen_jobs[job.name] = job
                self.ever_seen = True
                chosen = replace(chosen, state=add_created(chosen.state, job))
        if crash_after is not None:
            return self.restart_operator()
        self.cluster.write_status(observed, chosen)
        return None

    def decide(self) -> tuple[Plan, Observed]:
        cluster = self.cluster
        observed = cluster.observe(self.progress)
        lagging = Observed(
            observed.stored,
            tuple(self.seen_jobs.values()),
            tuple(self.seen_pods.values()),
            observed.nodes,
            self.progress,
            ranks=observed.ranks,
            rank_pods=observed.rank_pods,
        )
        chosen = cluster.think(lagging)
        return (cluster.think(observed), observed) if needs_fresh_look(chosen, lagging) else (chosen, lagging)

    @rule()
    def restart_operator(self) -> None:
        self.ever_seen = False
        self.hear_of_jobs()
        self.hear_of_pods()
        self.progress = None

    @rule()
    def hear_of_jobs(self) -> None:
        self.seen_jobs = dict(self.cluster.jobs)
        self.ever_seen |= bool(self.seen_jobs)

    @rule()
    def hear_of_pods(self) -> None:
        self.seen_pods = dict(self.cluster.pods)
        self.ever_seen |= bool(self.seen_pods)

    @rule()
    def poll(self) -> None:
        self.progress = self.cluster.poll() or self.progress

    # The cluster's own controllers.

    @rule()
    def job_controller(self) -> None:
        self.cluster.make_pod()
        self.cluster.conclude_jobs()

    @rule()
    def ranks_are_placed(self) -> None:
        self.cluster.place_ranks()

    @rule()
    def pods_go_away(self) -> None:
        self.cluster.forget_pods()

    @rule()
    def garbage_collector(self) -> None:
        self.cluster.collect_garbage()

    @rule(node=st.sampled_from(["n0", "n1", "n2"]))
    def scheduler_and_kubelet(self, node: str) -> None:
        self.cluster.schedule(node)
        self.cluster.start()

    @rule(code=st.sampled_from([75, 75, 143, 137, 0]))
    def kubelet_ends_deleted_pods(self, code: int) -> None:
        self.cluster.end_deleted(code)

    # What happens to a run.

    @rule(steps=st.integers(1, 5))
    def train(self, steps: int) -> None:
        self.cluster.train(steps)

    @rule(code=st.sampled_from(CODES), reason=st.sampled_from(["Error", "Error", "OOMKilled"]))
    def container_exits(self, code: int, reason: str) -> None:
        self.cluster.exit(code, reason if code == 137 else "")

    @rule(node=st.sampled_from(["n0", "n1", "n2"]))
    def node_is_lost(self, node: str) -> None:
        self.cluster.lose_node(node)

    @rule(node=st.sampled_from(["n0", "n1", "n2"]))
    def node_returns(self, node: str) -> None:
        self.cluster.return_node(node)

    @rule(held=st.booleans())
    def queue_decides(self, held: bool) -> None:
        self.cluster.hold(held)

    @rule(wanted=st.booleans())
    def user_suspends_or_resumes(self, wanted: bool) -> None:
        self.cluster.suspend(wanted)

    @rule(data=st.data())
    def somebody_deletes_a_pod(self, data: st.DataObject) -> None:
        if self.cluster.pods:
            self.cluster.delete_pod(data.draw(st.sampled_from(sorted(self.cluster.pods))))

    @rule(data=st.data())
    def somebody_deletes_a_job(self, data: st.DataObject) -> None:
        if self.cluster.jobs:
            name = data.draw(st.sampled_from(sorted(self.cluster.jobs)))
            self.cluster.delete_job(self.cluster.jobs[name].uid)

    @rule(seconds=st.sampled_from([1.0, 15.0, 61.0, 700.0]))
    def time_passes(self, seconds: float) -> None:
        self.cluster.wait(seconds)

    # What must hold.

    @invariant()
    def never_two_live_pods(self) -> None:
        live = [pod.name for pod in self.cluster.live_pods()]
        assert len(live) <= 1, live

    @invariant()
    def attempts_only_grow(self) -> None:
        """The cluster itself refuses a number that has left any trace; here, the status agrees."""
        numbers = [attempt["number"] for attempt in self.cluster.status.get("attempts", ())]
        assert numbers == sorted(set(numbers))
        newest = max(numbers, default=self.newest)
        assert newest >= self.newest
        self.newest = newest

    @invariant()
    def a_finished_run_stays_finished(self) -> None:
        outcome = ending_of(self.cluster.status)
        if self.finished is not None:
            assert outcome == self.finished
        self.finished = outcome

    @invariant()
    def the_status_is_a_function_of_what_is_observed(self) -> None:
        """Thinking twice says the same; and what was written, read back and written again, is the same."""
        chosen, observed = self.decide()
        assert chosen == self.cluster.think(observed)
        before = self.cluster.status
        self.cluster.write_status(observed, chosen)
        once = self.cluster.status
        again = Observed(**{**fields_of(observed), "stored": self.cluster.observe().stored})
        second = self.cluster.think(again)
        self.cluster.write_status(again, second)
        assert self.cluster.status == once
        # So our own write, when watching brings it back, is no reason for another pass.
        assert set(second.actions) <= set(chosen.actions)
        assert set(second.events) <= set(chosen.events)
        assert second.wake_at == chosen.wake_at
        self.cluster.status = before

    @invariant()
    def every_status_is_whole_and_fits_the_schema(self) -> None:
        status = self.cluster.status
        if status:
            kinds = [condition["type"] for condition in status["conditions"]]
            assert len(kinds) == len(set(kinds)) == 13
            assert all(condition["reason"] for condition in status["conditions"])
            RunStatus.model_validate(status, by_name=False)

    def teardown(self) -> None:
        """Once the world is kind, the run ends by itself or stands suspended, and nothing of it lives."""
        if not hasattr(self, "cluster"):
            return
        for node in ("n0", "n1", "n2"):
            self.cluster.return_node(node)
        for _ in range(200):
            self.restart_operator()
            self.poll()
            self.operator_works(None)
            self.cluster.hold(False)
            self.ranks_are_placed()
            self.job_controller()
            self.scheduler_and_kubelet("n0")
            self.cluster.exit(0)
            self.cluster.end_deleted(75)
            self.pods_go_away()
            self.garbage_collector()
            self.time_passes(61.0)
            self.never_two_live_pods()
            phase = self.cluster.status.get("phase")
            if phase in ("Succeeded", "Failed", "Suspended") and not self.cluster.live_pods():
                return
        raise AssertionError(f"the run comes to no end: {self.cluster.status}")


def ending_of(status: dict[str, Any]) -> tuple[str, str] | None:
    held = {each["type"]: each for each in status.get("conditions", ())}
    for kind in ("Complete", "Failed"):
        if kind in held and held[kind]["status"] == "True":
            return kind, status["completionTime"]
    return None


def fields_of(observed: Observed) -> dict[str, Any]:
    return {name: getattr(observed, name) for name in Observed.__slots__}


AnyOrder.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
test_any_order_of_events_and_any_crash_point = AnyOrder.TestCase
