"""A cluster in a hundred lines: one run, its Jobs, pods and nodes, moved by whoever may move them, in any order.

It is slower and simpler than the real one, and hand-written: the Job controller, scheduler, kubelets, node controller,
garbage collector, queue and users are one method each. The operator in it is the product's own planning.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from orbit_operator.actions import (
    Action,
    ApplySupport,
    CreateAttempt,
    CreateRanks,
    DeleteJob,
    DeletePod,
    DeleteRanks,
    DeleteRun,
    Plan,
    SetFinalizer,
    StartCleanup,
)
from orbit_operator.attempts import add_created
from orbit_operator.facts import (
    ContainerEnd,
    JobFacts,
    Lifecycle,
    NodeFacts,
    Observed,
    PodFacts,
    Progress,
    RanksFacts,
    RunFacts,
)
from orbit_operator.plan import Limits, plan
from orbit_operator.policies.suspend import is_lost
from orbit_operator.recorded_status import read_stored
from orbit_operator.status import build_status

GRACE = 30.0
UNKNOWN_PLAN = ("Unknown", "PlannerUnavailable", "")


@dataclass
class Cluster:
    """Everything that exists. Times move only by `wait`."""

    run: RunFacts
    limits: Limits = field(default_factory=lambda: Limits(node_lost_seconds=60.0))
    now: float = 1000.0
    status: dict[str, Any] = field(default_factory=dict)
    jobs: dict[str, JobFacts] = field(default_factory=dict)
    pods: dict[str, PodFacts] = field(default_factory=dict)
    nodes: dict[str, NodeFacts] = field(default_factory=lambda: {name: NodeFacts(name) for name in ("n0", "n1", "n2")})
    orphans: set[str] = field(default_factory=set)
    """Pods whose Job was deleted: the collector has not seen it yet."""
    created: list[int] = field(default_factory=list)
    """Numbers of all attempts whose Job was ever made, in order."""
    steps: dict[str, int] = field(default_factory=dict)
    """Steps that each pod has trained and checkpointed."""
    fenced: set[str] = field(default_factory=set)
    """Pods that stood on a node nobody could reach when the next attempt was made."""
    ranks: dict[str, RanksFacts] = field(default_factory=dict)
    """RayClusters by uid."""
    rank_pods: dict[str, PodFacts] = field(default_factory=dict)
    is_gone: bool = False
    cleanup: str = ""
    serial: int = 0

    # What the operator sees and does.

    def observe(self, progress: Progress | None = None) -> Observed:
        return Observed(
            stored=read_stored(json.loads(json.dumps(self.status))),
            jobs=tuple(self.jobs.values()),
            pods=tuple(self.pods.values()),
            nodes=dict(self.nodes),
            progress=progress,
            ranks=tuple(self.ranks.values()),
            rank_pods=tuple(self.rank_pods.values()),
            cleanup=self.cleanup,  # type: ignore[arg-type]
        )

    def think(self, observed: Observed) -> Plan:
        return plan(self.run, observed, self.now, self.limits, UNKNOWN_PLAN)

    def carry_out(self, action: Action) -> JobFacts | None:
        """One API call, safe to repeat; to a uid that is gone the answer is nothing. A new Job is returned."""
        if isinstance(action, CreateAttempt):
            name = f"{self.run.name}-a{action.number}"
            if name not in self.jobs:
                alive = [pod for pod in self.pods.values() if not pod.is_terminal]
                self.fenced |= {
                    pod.uid for pod in alive if is_lost(pod, self.nodes, self.now, self.limits.node_lost_seconds)
                }
                unfenced = [pod.name for pod in alive if pod.uid not in self.fenced]
                assert action.number not in self.recorded_numbers(), f"attempt {action.number} was there before"
                assert action.number >= max(self.created, default=0), f"attempt {action.number} after {self.created}"
                assert not unfenced, f"attempt {action.number} is made while {unfenced} may still write"
                placed = [pod for pod in self.rank_pods.values() if pod.node]
                assert self.run.nodes == 1 or len(placed) >= self.run.nodes, "GPUs are taken before ranks have theirs"
                self.created.append(action.number)
                held = self.run.lifecycle.queue_name is not None
                uid = self._uid("job")
                self.jobs[name] = JobFacts(name, uid, action.number, created=self.now, is_suspended=held)
            return self.jobs[name]
        if isinstance(action, CreateRanks):
            assert self.run.nodes > 1
            if all(each.attempt != action.attempt for each in self.ranks.values()):
                uid = self._uid("ranks")
                held = self.run.lifecycle.queue_name is not None
                self.ranks[uid] = RanksFacts(uid, uid, action.attempt, is_suspended=held)
        elif isinstance(action, DeleteRanks):
            gone = self.ranks.pop(action.uid, None)
            self.rank_pods = {uid: pod for uid, pod in self.rank_pods.items() if pod.job_uid != action.uid}
            alive = [pod.uid for pod in self.pods.values() if gone and pod.attempt == gone.attempt]
            alive = [uid for uid in alive if not self.pods[uid].is_terminal and uid not in self.fenced]
            assert not alive, f"the ranks of {alive} are taken away"
        elif isinstance(action, DeletePod):
            self.delete_pod(action.uid)
        elif isinstance(action, DeleteJob):
            self.delete_job(action.uid)
        elif isinstance(action, DeleteRun):
            self.is_gone = True
        elif isinstance(action, SetFinalizer):
            self.run = replace(self.run, finalizers=("orbitrl.dev/artifact-cleanup",) if action.present else ())
        elif isinstance(action, StartCleanup):
            self.cleanup = self.cleanup or "Running"
        else:
            assert isinstance(action, ApplySupport)
        return None

    def recorded_numbers(self) -> set[int]:
        """Attempts that the status knows, or that have left a Job or a pod."""
        kept = {*self.jobs.values(), *self.pods.values()}
        listed = {attempt["number"] for attempt in self.status.get("attempts", ())}
        return (
            listed
            | {each.attempt for each in kept}
            | set(range(1, 1 + self.status.get("retired", {}).get("through", 0)))
        )

    def write_status(self, observed: Observed, chosen: Plan) -> None:
        if chosen.state is not None:
            self.status = json.loads(json.dumps(build_status(self.run, observed, chosen.state, self.now)))

    # Everybody else.

    def make_pod(self) -> None:
        """Job controller: a Job that is not held and never had a pod gets one; a queue's comeback gets another."""
        for name, job in self.jobs.items():
            pods = [pod for pod in self.pods.values() if pod.job_uid == job.uid]
            failed = any(pod.phase == "Failed" for pod in pods)
            if job.finished is None and not job.is_suspended and not pods and not failed:
                uid = self._uid("pod")
                self.pods[uid] = PodFacts(uid, uid, job.attempt, job.uid, created=self.now)
                self.jobs[name] = replace(job, had_pod=True)

    def place_ranks(self) -> None:
        """KubeRay and the scheduler: a RayCluster's head and ranks are made, and each is placed."""
        for uid in (uid for uid, each in self.ranks.items() if not each.is_suspended):
            for number in range(self.run.nodes):
                name = f"{uid}-{number}"
                pod = PodFacts(name, name, 0, uid, "Running", f"r{number}", created=self.now, scheduled=self.now)
                self.rank_pods.setdefault(name, pod)

    def conclude_jobs(self) -> None:
        """Job controller: with `backoffLimit: 0` a Job ends with its pod, and not before the pod has."""
        for name, job in self.jobs.items():
            pods = [pod for pod in self.pods.values() if pod.job_uid == job.uid]
            if job.finished is not None or job.is_suspended or not pods or not all(pod.is_terminal for pod in pods):
                continue
            done = any(pod.phase == "Succeeded" for pod in pods)
            self.jobs[name] = replace(job, finished="Complete" if done else "Failed", finished_at=self.now,
                                      failure="" if done else "BackoffLimitExceeded")  # fmt: skip

    def forget_pods(self) -> None:
        """Pods that were deleted and have ended go away once their Job has counted them."""
        for uid, pod in list(self.pods.items()):
            job = next((job for job in self.jobs.values() if job.uid == pod.job_uid), None)
            if pod.is_terminal and pod.is_deleting and (job is None or job.finished or job.is_suspended):
                del self.pods[uid]

    def collect_garbage(self) -> None:
        for uid in list(self.orphans):
            self.orphans.discard(uid)
            self.delete_pod(uid)

    def schedule(self, node: str) -> None:
        for uid, pod in self.pods.items():
            if not pod.node and not pod.is_deleting and not pod.is_terminal and self.nodes[node].is_ready:
                self.pods[uid] = replace(pod, node=node, scheduled=self.now)
                return

    def start(self) -> None:
        for uid, pod in self.pods.items():
            if pod.node and self.nodes[pod.node].is_ready and not pod.is_terminal and not pod.is_deleting:
                self.pods[uid] = replace(pod, phase="Running", started=pod.started or self.now)

    def run_pod(self, node: str = "n0") -> None:
        """The Job's pod is made, placed and started."""
        self.make_pod()
        self.schedule(node)
        self.start()

    def train(self, steps: int) -> None:
        for uid, pod in self.pods.items():
            if pod.phase == "Running":
                self.steps[uid] = self.steps.get(uid, 0) + steps

    def exit(self, code: int, reason: str = "", message: str = "") -> None:
        """A container that runs ends; what an unreachable kubelet knows, nobody learns."""
        for uid, pod in self.pods.items():
            if pod.phase == "Running" and self.nodes[pod.node].is_ready:
                phase = "Succeeded" if code == 0 else "Failed"
                self.pods[uid] = replace(pod, phase=phase, end=ContainerEnd(code, reason, message, self.now))
                return

    def end_deleted(self, code: int) -> None:
        """Kubelets: a pod that is deleted ends within its grace period; one that never started just goes."""
        for uid, pod in list(self.pods.items()):
            if not pod.is_deleting or pod.is_terminal:
                continue
            if not pod.node:
                self.pods[uid] = replace(pod, phase="Failed")
            elif self.nodes[pod.node].is_ready:
                end = ContainerEnd(code, finished=self.now) if pod.started else None
                self.pods[uid] = replace(pod, phase="Succeeded" if code == 0 and end else "Failed", end=end)

    def delete_pod(self, uid: str) -> None:
        pod = self.pods.get(uid)
        if pod is not None and not pod.is_deleting:
            self.pods[uid] = replace(pod, deletion_due=self.now + GRACE)

    def delete_job(self, uid: str) -> None:
        for name, job in list(self.jobs.items()):
            if job.uid == uid:
                del self.jobs[name]
                self.orphans |= {pod.uid for pod in self.pods.values() if pod.job_uid == uid}

    def lose_node(self, node: str) -> None:
        if self.nodes[node].is_ready:
            self.nodes[node] = NodeFacts(node, is_ready=False, not_ready_since=self.now)

    def return_node(self, node: str) -> None:
        self.nodes[node] = NodeFacts(node)

    def hold(self, held: bool) -> None:
        """Kueue: gives a Job and its ranks their GPUs, or takes them back (their pods are deleted)."""
        self.hold_ranks(held)
        for name, job in self.jobs.items():
            if job.finished is None and self.run.lifecycle.queue_name:
                self.jobs[name] = replace(job, is_suspended=held)
                for pod in [pod for pod in self.pods.values() if held and pod.job_uid == job.uid]:
                    self.delete_pod(pod.uid)

    def hold_ranks(self, held: bool) -> None:
        if self.run.lifecycle.queue_name:
            self.ranks = {uid: replace(each, is_suspended=held) for uid, each in self.ranks.items()}
            self.rank_pods = {} if held else self.rank_pods

    def suspend(self, wanted: bool) -> None:
        self.run = replace(self.run, lifecycle=replace(self.run.lifecycle, suspend=wanted))

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def poll(self) -> Progress | None:
        """What the newest pod that can be reached says of itself."""
        for uid, pod in reversed(self.pods.items()):
            if pod.phase == "Running" and self.nodes[pod.node].is_ready:
                step = self.steps.get(uid, 0)
                return Progress(self.now, uid, "Running" if step else "Starting", step, checkpoint_step=step or None)
        return None

    # What is asserted.

    def live_pods(self) -> list[PodFacts]:
        """Pods that may write and are not fenced off."""
        return [pod for pod in self.pods.values() if not pod.is_terminal and pod.uid not in self.fenced]

    def _uid(self, kind: str) -> str:
        self.serial += 1
        return f"{kind}-{self.serial}"


def build_cluster(nodes: int = 1, **lifecycle: Any) -> Cluster:
    """A cluster of three nodes with one new run."""
    return Cluster(RunFacts("team", "adder", "run-1", created=1000.0, lifecycle=Lifecycle(**lifecycle), nodes=nodes))


def work(cluster: Cluster, progress: Progress | None = None) -> Plan:
    """One whole pass of an operator that sees everything; returns what was planned."""
    observed = cluster.observe(progress)
    chosen = cluster.think(observed)
    for action in chosen.actions:
        job = cluster.carry_out(action)
        if job is not None and chosen.state is not None:
            chosen = replace(chosen, state=add_created(chosen.state, job))
    cluster.write_status(observed, chosen)
    return chosen
