"""The only reader: turns the API's objects into facts, Kueue's Workloads among them, and asks the planner.

Belongs here: gathering everything about a run, and the planner's answer on its manifest in one line (`PlanAccepted`),
from facts that need neither the network nor a model's files. Does not belong here: deciding anything (`plan`,
`ending`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import orjson
from pydantic import ValidationError

from orbit_operator.api import EVENTS, JOBS, NODES, PODS, RAY_CLUSTERS, RUNS, Api, ApiError, Body, Kind
from orbit_operator.attempts import newest_pod
from orbit_operator.cache import Cache, Child, Key
from orbit_operator.facts import JobFacts, NodeFacts, Observed, PodFacts, Progress, QueueFacts, RecordedStatus, RunFacts
from orbit_operator.manifests.config_map import LARGEST_MANIFEST, MANIFEST_FILE, build_config_map
from orbit_operator.manifests.source import RUN_NAME, RUN_UID, RunSource, cleanup_name, metrics_port_of, run_folder
from orbit_operator.policies.failure import find_waiting, read_termination
from orbit_operator.policies.requeue import PATIENCE_SECONDS, tell_unseen
from orbit_operator.poll import read_progress
from orbit_operator.read import lifecycle_of, pack_run, read_job, read_node, read_pod, read_ranks, run_uid_of
from orbit_operator.recorded_status import read_stored
from orbit_operator.timestamps import read_time
from orbit_runtime.errors import OrbitError
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.model_info.cards import find_card_facts
from orbit_runtime.model_info.checkpoint import folder_facts
from orbit_runtime.model_info.weights import ModelFacts
from orbit_runtime.planner import Verdict as Judged
from orbit_runtime.planner import judge
from orbit_runtime.planner.job import requested_machine
from orbit_runtime.spec import OrbitRun
from orbit_runtime.spec.placement import Placement, check_pod
from orbit_runtime.spec.run import API_VERSION, upgrade_manifest

NODE_SECONDS = 5.0
"""A node is not read more often than this."""
KUBERAY_MISSING = "the cluster has no RayCluster (ray.io/v1), which placement.nodes needs: install KubeRay's operator"


Verdict = tuple[str, str, str]
"""Status, reason and message of `PlanAccepted`."""
UNREAD: Verdict = ("Unknown", "PlannerUnavailable", "")
BUILTIN = "builtin://"
GIB = 2**30


def check_plan(run: OrbitRun) -> Verdict:
    """A refusal is final: no pod is created. If a fact is missing, the pod plans, and refuses with exit code 78."""
    try:
        machine = requested_machine(run)
        if machine is None:
            return _unknown("placement.gpuProduct names no GPU; the pod itself checks what fits before it trains")
        if machine.gpu is None and machine.host_bytes is None:
            return _unknown("placement.resources.memory is not set; the pod itself checks what fits before it trains")
        model = find_model(run)
    except OrbitError as error:
        return _unknown(_sentence(error.message, error.where, error.fix))
    if model is None:
        return _unknown(f"no facts about {run.spec.model.uri} are shipped; the pod itself checks what fits")
    return _sentences(judge(run, model, machine))


def find_model(run: OrbitRun) -> ModelFacts | None:
    """The model's facts, from what is shipped with the operator alone."""
    uri = run.spec.model.uri
    if uri.startswith(BUILTIN):
        return folder_facts(builtin_folder(uri.removeprefix(BUILTIN), run.spec.model.precision))
    return find_card_facts(uri)


def _sentences(found: Judged) -> Verdict:
    if found.problem is not None:
        return "False", found.reason, _sentence(found.problem.message, found.problem.where, found.problem.fix)
    made = found.plan
    assert made is not None, "whatever is not refused was planned"
    assert made.capacity is not None, "asked with a machine whose memory is known"
    device = made.machine.split(" x ")[-1]
    used, there = made.total(made.binding) / GIB, made.capacity / GIB
    text = f"{used:.1f} GiB of {device} in phase {made.binding}, {there:.1f} are available"
    return "True", "Fits", "; ".join([text, *made.notes])[:1024]


def _unknown(why: str) -> Verdict:
    return "Unknown", "PlannerUnavailable", why


def _sentence(message: str, where: str | None, fix: str | None) -> str:
    head = f"{where}: {message}" if where else message
    return (f"{head}; {fix}" if fix else head)[:1024]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Conclusions from a manifest alone."""

    invalid: str = ""
    """Fields that this operator cannot read in the manifest although the API server accepted it."""
    plan: tuple[str, str, str] = UNREAD
    """Status, reason and message of `PlanAccepted`."""


class Observer:
    """Gathers everything about a run. `progress` is filled by polling."""

    def __init__(self, api: Api, cache: Cache, queue: str = "", pod: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._api = api
        self._cache = cache
        self._queue = queue
        self._pod = pod
        self._kueue = Kueue(api)
        self.progress: dict[Key, Progress] = {}
        self._nodes: dict[str, tuple[float, NodeFacts | None]] = {}
        self._judged: dict[Key, tuple[str, int, Judgement]] = {}

    async def look(self, key: Key, now: float, *, fresh: bool = False) -> tuple[RunFacts, Body, Observed] | None:
        """The run, its object, and everything that belongs to it; `None` if there is no such run.

        Args:
            fresh: read from the API server itself instead of from the cache.
        """
        if fresh:
            body, jobs, pods = await asyncio.gather(
                self._api.get(RUNS, *key), self._children(JOBS, key, read_job), self._children(PODS, key, read_pod)
            )
            raw = None if body is None else pack_run(body)
            there = {each.facts.uid for each in pods}
            ended = (each for each in self._cache.pods.of(key) if each.facts.is_terminal)
            pods = [*pods, *(each for each in ended if each.facts.uid not in there)]
        else:
            raw, jobs, pods = self._cache.run(key), [*self._cache.jobs.of(key)], [*self._cache.pods.of(key)]
        if raw is None:
            return None
        body = orjson.loads(raw.body)
        run = self._run(body)
        return run, body, await self._gather(run, body, jobs, pods, now)

    async def _children[F](self, kind: Kind, key: Key, read: Callable[[Body], F]) -> list[Child[F]]:
        selector = {"labelSelector": f"{RUN_NAME}={key[1]}"}
        return [Child(run_uid_of(item), read(item)) async for item in self._api.list(kind, key[0], selector)]

    def forget(self, key: Key) -> None:
        """Forgets a run that is gone."""
        self.progress.pop(key, None)
        self._judged.pop(key, None)

    async def _gather(
        self, run: RunFacts, body: Body, jobs: Iterable[Child[JobFacts]], pods: Iterable[Child[PodFacts]], now: float
    ) -> Observed:
        pods = [Child(each.run_uid, tell_unseen(each.facts, now)) for each in pods]
        own_pods = tuple(each.facts for each in pods if each.run_uid == run.uid and each.facts.attempt > 0)
        own_jobs = [each.facts for each in jobs if each.run_uid == run.uid]
        cleanup = next((job for job in own_jobs if job.name == cleanup_name(run.name)), None)
        attempts = tuple(job for job in own_jobs if job.attempt > 0)
        stored = read_stored(body.get("status") or {})
        observed = Observed(
            stored=stored,
            jobs=attempts,
            pods=own_pods,
            nodes=await self._troubled_nodes(own_pods, stored),
            progress=self._newest_word(run, own_pods, stored),
            is_new=not self._cache.had_children(run.uid),
            former_pods=sum(each.run_uid != run.uid and not each.facts.is_terminal for each in pods),
            cleanup="" if cleanup is None else cleanup.finished or _cleanup_state(cleanup, pods),
            cleanup_failure="" if cleanup is None else why_failed(cleanup, (each.facts for each in pods)),
        )
        if run.nodes > 1:
            others = [each.facts for each in pods if each.run_uid == run.uid and each.facts.attempt == 0]
            observed = await self._with_ranks(run, observed, others)
        live = [job for job in attempts if job.finished is None]
        held = [each.uid for each in live[-1:] if each.is_suspended]
        held += [each.uid for each in observed.ranks if each.is_suspended and not each.is_deleting]
        if held:
            observed = replace(observed, queue=await self._kueue.ask(run.namespace, held[0]))
        return replace(observed, warning=await self._warning(run.namespace, live, own_pods, now))

    async def _with_ranks(self, run: RunFacts, observed: Observed, pods: Sequence[PodFacts]) -> Observed:
        """Adds RayClusters and their pods. RayClusters are read and not watched: such runs are few, and most clusters
        lack the kind."""
        selector = {"labelSelector": f"{RUN_UID}={run.uid}"}
        try:
            found = [read_ranks(item) async for item in self._api.list(RAY_CLUSTERS, run.namespace, selector)]
        except ApiError as error:
            if error.status not in (403, 404):
                raise
            return replace(observed, ranks_problem=KUBERAY_MISSING if error.status == 404 else error.message)
        return replace(
            observed,
            ranks=tuple(found),
            rank_pods=tuple(pod for pod in pods if pod.job_uid in {each.uid for each in found}),
        )

    def _newest_word(self, run: RunFacts, pods: Sequence[PodFacts], stored: RecordedStatus) -> Progress | None:
        """Remembers a pod's last words, so that an earlier report does not replace them once the pod is deleted."""
        progress = newest_word(run.name, pods, stored, self.progress.get(run.key))
        if progress is not None:
            self.progress[run.key] = progress
        return progress

    async def _troubled_nodes(self, pods: Iterable[PodFacts], stored: RecordedStatus) -> dict[str, NodeFacts]:
        """Nodes of pods that are in trouble or have just failed, but not of ended pods that already have a verdict."""
        judged = {attempt.number for attempt in stored.attempts if attempt.is_over}
        unclear = (pod for pod in pods if not (pod.is_terminal and pod.attempt in judged))
        names = {pod.node for pod in unclear if pod.node and (pod.is_deleting or not pod.is_ready) and pod.started}
        found = {}
        for name in sorted(names):
            asked, node = self._nodes.get(name, (-NODE_SECONDS, None))
            if time.monotonic() - asked >= NODE_SECONDS:
                node = await self._ask_node(name)
                self._nodes[name] = (time.monotonic(), node)
            if node is not None:
                found[name] = node
        return found

    async def _ask_node(self, name: str) -> NodeFacts | None:
        """The node, or `None` if nodes may not be read: other signs must then suffice."""
        try:
            body = await self._api.get(NODES, None, name)
        except ApiError as error:
            if error.status == 403:
                return None
            raise
        return NodeFacts(name, exists=False, is_ready=False) if body is None else read_node(body)

    async def _warning(self, namespace: str, jobs: list[JobFacts], pods: tuple[PodFacts, ...], now: float) -> str:
        """Why a pod or a container is not created, in the words of the component that failed to."""
        job = jobs[-1] if jobs else None
        if job is None or job.is_suspended:
            return ""
        # A queue that took the Job back and gave it room again left an earlier pod that has ended.
        pod = newest_pod([each for each in pods if each.attempt == job.attempt])
        since, uid = (job.created, job.uid) if pod is None else (pod.scheduled or now, pod.uid)
        creating = pod is None or (pod.node and not pod.started and not pod.is_terminal)
        return await self._newest_warning(namespace, uid) if creating and now - since >= PATIENCE_SECONDS else ""

    async def _newest_warning(self, namespace: str, uid: str) -> str:
        selector = f"involvedObject.uid={uid},type=Warning"
        newest = ("", "")
        with contextlib.suppress(ApiError):
            async for item in self._api.list(EVENTS, namespace, {"fieldSelector": selector}):
                when = str(item.get("lastTimestamp") or item.get("eventTime") or "")
                newest = max(newest, (when, f"{item.get('reason')}: {item.get('message')}"[:900]))
        return newest[1]

    def _run(self, body: Body) -> RunFacts:
        metadata, spec = body["metadata"], body.get("spec") or {}
        generation, judged = int(metadata.get("generation") or 0), self._judge(body)
        placement, storage = spec.get("placement") or {}, spec.get("storage") or {}
        nodes = int(placement.get("nodes", Placement().nodes))
        return RunFacts(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            generation=generation,
            created=read_time(metadata.get("creationTimestamp")) or 0.0,
            deleting_since=read_time(metadata.get("deletionTimestamp")),
            finalizers=tuple(metadata.get("finalizers") or ()),
            annotations=metadata.get("annotations") or {},
            lifecycle=lifecycle_of(spec, self._queue),
            gpus=int(placement.get("gpus", Placement().gpus)) * nodes,
            nodes=nodes,
            total_steps=(spec.get("training") or {}).get("steps"),
            checkpoint_every=int((spec.get("checkpoint") or {}).get("everySteps") or 1),
            deletes_artifacts=storage.get("deletionPolicy") == "Delete",
            artifacts=run_folder(storage.get("uri"), metadata["name"]),
            metrics_port=metrics_port_of(spec),
            invalid=judged.invalid,
            plan=judged.plan,
        )

    def _judge(self, body: Body) -> Judgement:
        """Judges each version of the manifest once: it does not change by itself."""
        metadata = body["metadata"]
        key, uid = (metadata["namespace"], metadata["name"]), metadata["uid"]
        generation = int(metadata.get("generation") or 0)
        known = self._judged.get(key)
        if known is None or known[:2] != (uid, generation):
            known = self._judged[key] = (uid, generation, judge_manifest(body, self._pod))
        return known[2]


def _cleanup_state(job: JobFacts, pods: Iterable[Child[PodFacts]]) -> Literal["Running", "Complete"]:
    """`Complete` as soon as its container is done: one that a webhook injects may keep the pod for ever."""
    ends = (each.facts.end for each in pods if each.facts.job_uid == job.uid)
    return "Complete" if any(end is not None and end.exit_code == 0 for end in ends) else "Running"


def why_failed(job: JobFacts, pods: Iterable[PodFacts]) -> str:
    """The newest pod's last words, else the Job controller's reason; while the Job has not failed, why it waits."""
    own = [each for each in pods if each.job_uid == job.uid]
    if job.finished != "Failed":
        waits = newest_pod([each for each in own if not each.is_terminal])
        return "" if waits is None else waits.unschedulable or (find_waiting(waits) or ("", "", ""))[2]
    pod = newest_pod([each for each in own if each.end is not None])
    words = "" if pod is None or pod.end is None else " ".join(pod.end.message.split())
    return words or job.failure


def newest_word(run: str, pods: Sequence[PodFacts], stored: RecordedStatus, heard: Progress | None) -> Progress | None:
    """The newest pod's report: its termination message takes precedence over polls while it lived.

    Reports of a pod of an earlier run with the same name are ignored.
    """
    pod = newest_pod(pods)
    own = {each.uid for each in pods} | {attempt.pod_uid for attempt in stored.attempts}
    heard = heard if heard is not None and heard.pod_uid in own else None
    if pod is None or pod.end is None:
        return heard
    at = pod.end.finished if pod.end.finished is not None else pod.created
    return read_progress(read_termination(pod.end.message), run, pod.uid, at) or heard


def judge_manifest(body: Body, installed: Mapping[str, Any] = MappingProxyType({})) -> Judgement:
    """Reads the manifest as the pod will, and asks the planner."""
    try:
        source = build_source(body, installed)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in found["loc"])
        return Judgement(f"{place}: {found['msg']}; the operator and the CRD may be of different versions"[:900])
    size = len(build_config_map(source)["data"][MANIFEST_FILE].encode())
    if size > LARGEST_MANIFEST:
        return Judgement(
            f"the manifest takes {size} bytes, but the ConfigMap that carries it to the pod holds {LARGEST_MANIFEST}; "
            "put prompts and other data into files and name their URI (hf://, s3://, pvc://)"
        )
    placement = source.manifest.spec.placement
    for each in check_pod(placement.model_copy(update={"pod": source.pod})):
        return Judgement(f"spec.placement.pod, with the installation's runs.pod: {each.message}; {each.fix}"[:900])
    if not _sees_model(source.manifest):
        return Judgement(
            "spec.placement.modelCache.claimName: with several nodes each reads the model's files; name a claim that "
            "all of them can mount (ReadWriteMany), or a model on one (spec.model.uri: pvc://CLAIM/PATH)"
        )
    return Judgement(plan=check_plan(source.manifest))


def _sees_model(manifest: OrbitRun) -> bool:
    """Whether every node of the run finds the model's files at the same place."""
    spec = manifest.spec
    shared = spec.placement.model_cache.claim_name is not None or spec.model.uri.startswith("pvc://")
    return spec.placement.nodes == 1 or shared


def build_source(body: Body, installed: Mapping[str, Any] = MappingProxyType({})) -> RunSource:
    """The input from which the objects of a run are made.

    Args:
        installed: what the installation adds to pods of runs.
    """
    metadata = body["metadata"]
    document = upgrade_manifest(
        {
            "apiVersion": API_VERSION,
            "kind": "OrbitRun",
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            "spec": body.get("spec") or {},
        }
    )
    manifest = OrbitRun.model_validate(document, by_name=False)
    return RunSource(metadata["namespace"], metadata["name"], metadata["uid"], document["spec"], manifest, installed)


WORKLOADS = tuple(Kind(f"/apis/kueue.x-k8s.io/{version}", "workloads") for version in ("v1beta2", "v1beta1"))
"""Newest first. The fields that we read, a Workload's label and conditions, are the same in both versions."""
ABSENT_SECONDS = 60.0
"""Seconds before a version is requested again if none was served."""


class Kueue:
    """Requests Workloads in the version that answered last. `clock` counts seconds from any origin."""

    def __init__(self, api: Api, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._served: Kind | None = None
        self._absent_since: float | None = None

    async def ask(self, namespace: str, job_uid: str) -> QueueFacts | None:
        """`None` without Kueue, without the right to read it, or before it has created the Job's Workload."""
        if self._absent_since is not None and self._clock() - self._absent_since < ABSENT_SECONDS:
            return None
        remembered = () if self._served is None else (self._served,)
        for kind in (*remembered, *(each for each in WORKLOADS if each not in remembered)):
            try:
                found = await self._first(kind, namespace, job_uid)
            except ApiError as error:
                if error.status != 404:
                    return None
                # Kueue was upgraded or removed.
                self._served = None
            else:
                self._served, self._absent_since = kind, None
                return found
        self._absent_since = self._clock()
        return None

    async def _first(self, kind: Kind, namespace: str, job_uid: str) -> QueueFacts | None:
        selector = f"kueue.x-k8s.io/job-uid={job_uid}"
        async for item in self._api.list(kind, namespace, {"labelSelector": selector}):
            return read_workload(item)
        return None


def read_workload(workload: Mapping[str, Any]) -> QueueFacts:
    """Why a Workload waits now: the newest of its eviction and its missing quota, else the checks that hold it."""
    status = workload.get("status") or {}
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    reasons = [
        conditions[kind]
        for kind, truth in (("Evicted", "True"), ("QuotaReserved", "False"))
        if conditions.get(kind, {}).get("status") == truth
    ]
    if reasons:
        newest = max(reasons, key=lambda each: read_time(each.get("lastTransitionTime")) or 0.0)
        return QueueFacts(str(newest.get("reason") or newest["type"]), str(newest.get("message") or "")[:900])
    for check in status.get("admissionChecks") or ():
        if check.get("state") != "Ready":
            message = f"admission check {check.get('name')}: {check.get('message') or check.get('state')}"
            return QueueFacts(f"AdmissionCheck{check.get('state')}", message[:900])
    if (found := conditions.get("Admitted", {})).get("status") == "False":
        return QueueFacts(str(found.get("reason") or "Admitted"), str(found.get("message") or "")[:900])
    return QueueFacts("QueuedByKueue", "waiting for the queue")
