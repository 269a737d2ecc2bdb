"""What kopf brings is a key for the queue: what it says was taken by the intake on its way. Nothing else happens here.

Belongs here: decorators and one-line calls. Does not belong here: logic of any kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import kopf

from orbit_operator.cache import Key
from orbit_operator.intake import Intake
from orbit_operator.read import run_name_of
from orbit_operator.resync import CHILDREN
from orbit_operator.session import open_session
from orbit_operator.settings import Settings
from orbit_operator.sight import Sight
from orbit_operator.stateless import NoDiffBase, NoProgress

Body = Mapping[str, Any]
WATCH_PAUSES = (0.5, 1.0, *[2.0] * 30)
"""Seconds between attempts to watch; after the last one the process ends, and its Deployment starts it anew."""
SILENT_SECONDS = 70.0
"""A watch that brings nothing for so long is dead, though its connection stands: the API server sends a bookmark every
minute. It is asked for again."""
RUN, JOB, POD = ("orbitrl.dev", "v1alpha1", "orbitruns"), ("batch", "v1", "jobs"), ("", "v1", "pods")


def build_registry(intake: Intake, sight: Sight, changed: Callable[[Key], None]) -> kopf.OperatorRegistry:
    """All handlers.

    Args:
        changed: told of every run that something happened to.
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
    chosen.watching.inactivity_timeout = SILENT_SECONDS
    # A page is parsed whole: a thousand runs at once would be the most memory there ever is.
    chosen.watching.chunk_size = 50
    chosen.networking.request_timeout = 60
    chosen.networking.connect_timeout = 10
    # An API server that is back is watched again at once: by default the pauses grow to 21 s.
    chosen.networking.error_backoffs = WATCH_PAUSES
    chosen.queueing.exit_timeout = 1.0
    # A worker is a task with a queue until it is idle for so long: a burst must not leave a thousand of them.
    chosen.queueing.idle_timeout = 0.02
    chosen.watching.label_selectors[JOB] = CHILDREN
    chosen.watching.label_selectors[POD] = CHILDREN
    return chosen
