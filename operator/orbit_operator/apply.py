"""The only writer: turns actions into API calls, each of which is safe to repeat.

Belongs here: carrying out actions, writing the status, and what a run reports if the API server refuses an attempt.
Does not belong here: choosing actions (`plan`), trying again (`main`).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
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
    SetFinalizer,
    StartCleanup,
    State,
)
from orbit_operator.api import CONFIG_MAPS, JOBS, NETWORK_POLICIES, PODS, RAY_CLUSTERS, RUNS, Api, ApiError, Body, Kind
from orbit_operator.attempts import add_created
from orbit_operator.cache import Cache, Child, read_version
from orbit_operator.ending import FINALIZER
from orbit_operator.facts import JobFacts, RunFacts
from orbit_operator.manifests.cleanup import build_cleanup_job
from orbit_operator.manifests.config_map import build_config_map
from orbit_operator.manifests.job import build_job
from orbit_operator.manifests.network_policy import build_network_policy
from orbit_operator.manifests.ray_cluster import build_ray_cluster
from orbit_operator.manifests.source import RUN_UID, RunSource
from orbit_operator.observe import build_source
from orbit_operator.read import pack_run, read_job
from orbit_operator.settings import Settings
from orbit_runtime.spec.run import API_VERSION


class NameTakenError(Exception):
    """A Job or RayCluster of this name has another owner."""


class Writer:
    """Carries out the actions of one run after another. Responses of the API enter the cache at once."""

    def __init__(self, api: Api, cache: Cache, settings: Settings) -> None:
        self._api = api
        self._cache = cache
        self._settings = settings
        self.crd_lacks: tuple[str, ...] = ()
        """Paths of fields that the installed CRD lacks; set by the check that compares it with ours."""

    async def carry_out(self, action: Action, run: RunFacts, body: Body, state: State | None) -> State | None:
        """Carries out one action; returns the state with what the action adds."""
        match action:
            case CreateAttempt(number, avoid_nodes):
                source = self._source(body)
                await self._apply_support(source)
                job = await self._create_job(run, build_job(source, number, avoid_nodes, self._settings))
                return None if state is None else add_created(state, job)
            case CreateRanks(attempt):
                source = self._source(body)
                await self._apply_support(source)
                await self._create(RAY_CLUSTERS, run, build_ray_cluster(source, attempt, self._settings))
            case DeleteRanks(name, uid):
                await self._api.delete(RAY_CLUSTERS, run.namespace, name, uid)
            case ApplySupport():
                await self._apply_support(self._source(body))
            case StartCleanup():
                await self._create_job(run, build_cleanup_job(self._source(body), self._settings))
            case DeletePod(name, uid):
                await self._api.delete(PODS, run.namespace, name, uid)
            case DeleteJob(name, uid):
                await self._api.delete(JOBS, run.namespace, name, uid)
            case DeleteRun():
                await self._api.delete(RUNS, run.namespace, run.name, run.uid)
            case SetFinalizer(present):
                self._keep(await self._set_finalizer(run, body, present))
        return state

    async def write_status(self, run: RunFacts, body: Body, status: dict[str, Any]) -> None:
        """Writes the whole status in one call. Refused (409) if the run has changed since it was observed."""
        # With the uid, a status never recreates a run that is gone.
        version = body["metadata"]["resourceVersion"]
        head = {"namespace": run.namespace, "name": run.name, "uid": run.uid, "resourceVersion": version}
        document = {"apiVersion": API_VERSION, "kind": "OrbitRun", "metadata": head, "status": status}
        self._keep(await self._api.apply(RUNS, run.namespace, document, "status"))

    def _source(self, body: Body) -> RunSource:
        return build_source(body, self._settings.run_pod)

    async def _apply_support(self, source: RunSource) -> None:
        """Applies what the pod mounts and what it may reach, in either order, before the pod exists."""
        calls = [self._api.apply(CONFIG_MAPS, source.namespace, build_config_map(source))]
        if self._settings.network_policies:
            policy = build_network_policy(source, self._settings)
            calls.append(self._api.apply(NETWORK_POLICIES, source.namespace, policy))
        await asyncio.gather(*calls)

    async def _create_job(self, run: RunFacts, job: Body) -> JobFacts:
        made = await self._create(JOBS, run, job)
        facts = read_job(made)
        version = read_version(made["metadata"].get("resourceVersion"))
        self._cache.put_job(run.key, Child(run.uid, facts), version)
        return facts

    async def _create(self, kind: Kind, run: RunFacts, body: Body) -> Body:
        """Creates and never applies: applying to an existing object could revert the decisions of others, such as a
        queue."""
        try:
            return await self._api.create(kind, run.namespace, body)
        except ApiError as error:
            if error.status != 409 or error.reason != "AlreadyExists":
                raise
            name = body["metadata"]["name"]
            found = await self._api.get(kind, run.namespace, name)
            if found is None or (found["metadata"].get("labels") or {}).get(RUN_UID) != run.uid:
                raise NameTakenError(f"{body['kind']} {name} exists and is not this run's") from None
            return found

    async def _set_finalizer(self, run: RunFacts, body: Body, present: bool) -> Body:
        """Changes our finalizer only; those of others stay as they are."""
        others = [name for name in run.finalizers if name != FINALIZER]
        wanted = [*others, FINALIZER] if present else others
        patch = {"metadata": {"resourceVersion": body["metadata"]["resourceVersion"], "finalizers": wanted}}
        made = await self._api.merge(RUNS, run.namespace, run.name, patch)
        body["metadata"]["resourceVersion"] = made["metadata"]["resourceVersion"]
        return made

    def _keep(self, body: Body) -> None:
        self._cache.put_written((body["metadata"]["namespace"], body["metadata"]["name"]), pack_run(body))


LASTING = (400, 403, 413, 422)
"""Status codes for a quota, an admission rule, a missing right or an invalid object; others resolve themselves."""


def explain_refusal(action: Action, error: ApiError | NameTakenError, state: State) -> State | None:
    """The state of a run whose attempt cannot be created; `None` if the refusal does not concern the run."""
    match action:
        case CreateAttempt(number):
            what = f"attempt {number}"
        case CreateRanks(number):
            what = f"the RayCluster of attempt {number}"
        case _:
            return None
    if isinstance(error, NameTakenError):
        return replace(state, phase="Pending", reason="NameTaken", message=f"{error}; delete it", owner="user")
    if error.status not in LASTING:
        return None
    reason = "QuotaExceeded" if "exceeded quota" in error.message else "AttemptRefused"
    message = f"{what} cannot be created: {error.message}"[:1024]
    return replace(state, phase="Pending", reason=reason, message=message, owner="cluster")
