"""kopf's handlers: each only adds a key to the queue, as the intake has already taken the object's contents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import kopf

from orbit_operator.cache import Key
from orbit_operator.intake import Intake
from orbit_operator.namespaces import NamespaceView
from orbit_operator.read import run_name_of
from orbit_operator.resync import CHILDREN
from orbit_operator.session import open_session
from orbit_operator.settings import Settings

Body = Mapping[str, Any]
WATCH_PAUSES = (0.5, 1.0, *[2.0] * 30)
"""Seconds between attempts to watch; after the last one the process ends, and its Deployment restarts it."""
SILENT_SECONDS = 70.0
"""A watch that is silent for this long is dead, even if its connection is open: the API server sends a bookmark every
minute. The watch is then requested again."""
RUN, JOB, POD = ("orbitrl.dev", "v1alpha1", "orbitruns"), ("batch", "v1", "jobs"), ("", "v1", "pods")


def build_registry(intake: Intake, sight: NamespaceView, changed: Callable[[Key], None]) -> kopf.OperatorRegistry:
    """All handlers.

    Args:
        changed: called with the key of every run that changed.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**kwargs: Any) -> Any:
        info = kopf.login_with_kubeconfig(**kwargs) or kopf.login_with_service_account(**kwargs)
        return None if info is None else open_session(info, intake, sight)

    @kopf.on.event(*RUN, registry=registry)
    @kopf.on.event(*JOB, registry=registry)
    @kopf.on.event(*POD, registry=registry)
    async def tell(body: Body, **_: Any) -> None:
        changed((body["metadata"]["namespace"], run_name_of(body)))

    return registry


def build_kopf_settings(settings: Settings) -> kopf.OperatorSettings:
    """No peering, no scanning, no events posted by kopf, nothing stored in objects; a time limit on every request."""
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
    chosen.watching.inactivity_timeout = SILENT_SECONDS
    # A page is parsed whole: a thousand runs in one page would set the peak of memory.
    chosen.watching.chunk_size = 50
    chosen.networking.request_timeout = 60
    chosen.networking.connect_timeout = 10
    # Watch again soon after the API server is back: by default the pauses grow to 21 s.
    chosen.networking.error_backoffs = WATCH_PAUSES
    chosen.queueing.exit_timeout = 1.0
    # kopf keeps a worker (a task and its queue) until it has been idle for this long: a burst must not leave thousands.
    chosen.queueing.idle_timeout = 0.02
    chosen.watching.label_selectors[JOB] = CHILDREN
    chosen.watching.label_selectors[POD] = CHILDREN
    return chosen


class NoDiffBase(kopf.DiffBaseStorage):
    """Always returns an empty object, so that nothing ever differs."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


class NoProgress(kopf.ProgressStorage):
    """Stores no handler's progress."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None

    def purge(self, **_: Any) -> None:
        return None

    def touch(self, **_: Any) -> None:
        return None

    def clear(self, *, essence: Any) -> Any:
        return essence
