"""What kopf brings goes into the cache, and the run's key into the queue. Nothing else happens here.

Belongs here: decorators and one-line calls. Does not belong here: logic of any kind.
The index functions store nothing with kopf: they make it hold back every event until all first lists are in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import kopf

from orbit_operator.cache import Cache, Child, Key, read_version
from orbit_operator.read import pack_run, read_job, read_pod, run_name_of, run_uid_of
from orbit_operator.resync import CHILDREN
from orbit_operator.settings import Settings
from orbit_operator.stateless import NoDiffBase, NoProgress

Body = Mapping[str, Any]
RUN, JOB, POD = ("orbitrl.dev", "v1alpha1", "orbitruns"), ("batch", "v1", "jobs"), ("", "v1", "pods")


def build_registry(
    cache: Cache, changed: Callable[[Key], None], updated: Callable[[Key, str, int], None]
) -> kopf.OperatorRegistry:
    """All handlers.

    Args:
        changed: told of every run that something happened to.
        updated: told of every version of a run itself: its uid and the version.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> Any:
        return kopf.login_with_kubeconfig(**kwargs) or kopf.login_with_service_account(**kwargs)

    @kopf.index(*RUN, registry=registry)
    async def keep_run(body: Body, **_: Any) -> None:
        put_run(cache, body)

    @kopf.index(*JOB, registry=registry)
    async def keep_job(body: Body, **_: Any) -> None:
        put_child(cache, "jobs", body)

    @kopf.index(*POD, registry=registry)
    async def keep_pod(body: Body, **_: Any) -> None:
        put_child(cache, "pods", body)

    @kopf.on.event(*RUN, registry=registry)
    async def on_run(event: Body, body: Body, uid: str, **_: Any) -> None:
        key = (body["metadata"]["namespace"], body["metadata"]["name"])
        if event["type"] == "DELETED":
            cache.runs.drop(uid)
            cache.forget_run(uid)
            changed(key)
        else:
            updated(key, uid, read_version(body["metadata"].get("resourceVersion")))

    @kopf.on.event(*JOB, registry=registry)
    async def on_job(event: Body, body: Body, uid: str, **_: Any) -> None:
        if event["type"] == "DELETED":
            cache.jobs.drop(uid)
        changed((body["metadata"]["namespace"], run_name_of(body)))

    @kopf.on.event(*POD, registry=registry)
    async def on_pod(event: Body, body: Body, **_: Any) -> None:
        if event["type"] == "DELETED":
            drop_pod(cache, body)
        changed((body["metadata"]["namespace"], run_name_of(body)))

    return registry


def put_run(cache: Cache, body: Body) -> None:
    run = pack_run(body)
    cache.runs.put((body["metadata"]["namespace"], body["metadata"]["name"]), run.uid, run, read_version(run.version))


def put_child(cache: Cache, kind: str, body: Body) -> None:
    head = body["metadata"]
    key, version = (head["namespace"], run_name_of(body)), read_version(head.get("resourceVersion"))
    if kind == "jobs":
        cache.put_job(key, Child(run_uid_of(body), read_job(body)), version)
    else:
        cache.put_pod(key, Child(run_uid_of(body), read_pod(body)), version)


def drop_pod(cache: Cache, body: Body) -> None:
    """How a pod ended stays known until its Job has ended as well: the next checks of the cache drop it."""
    if read_pod(body).is_terminal:
        put_child(cache, "pods", body)
    else:
        cache.pods.drop(body["metadata"]["uid"])


def build_kopf_settings(settings: Settings) -> kopf.OperatorSettings:
    """No peering, no scanning, no posting, nothing stored in objects; every request has a time limit."""
    chosen = kopf.OperatorSettings()
    chosen.peering.standalone = True
    chosen.scanning.disabled = True
    chosen.posting.enabled = False
    chosen.persistence.diffbase_storage = NoDiffBase()
    chosen.persistence.progress_storage = NoProgress()
    chosen.process.ultimate_exiting_timeout = 25
    chosen.watching.server_timeout = 300
    chosen.watching.client_timeout = 330
    chosen.watching.connect_timeout = 10
    chosen.watching.chunk_size = 500
    chosen.networking.request_timeout = 60
    chosen.networking.connect_timeout = 10
    chosen.queueing.exit_timeout = 1.0
    # A worker holds the parsed object, ten times its size as text, until it is idle for so long.
    chosen.queueing.idle_timeout = 0.2
    chosen.watching.label_selectors[JOB] = CHILDREN
    chosen.watching.label_selectors[POD] = CHILDREN
    return chosen
