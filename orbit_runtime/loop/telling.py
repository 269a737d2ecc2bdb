"""Whom else a run tells: trackers of every step, webhooks of its end.

Belongs here: from the manifest to those, and which rows a start sends again. Does not belong here: the kinds and how
they are told (`observability`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from orbit_runtime.errors import InternalError
from orbit_runtime.loop.show import Show
from orbit_runtime.observability.metrics import parse_row
from orbit_runtime.observability.notify import Webhook, build_body, notify
from orbit_runtime.observability.trackers import Asked, Tracking, check_trackers, open_tracker
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage import NotFound, Store


def asked_trackers(run: OrbitRun, store: Store, started: float) -> list[Asked]:
    """Raises UnsupportedError where one cannot work. Args: started: when the run began, the same in each start."""
    marked = hashlib.sha256(f"{run.name} {started!r}".encode()).hexdigest()[:12]
    is_local = "://" not in store.uri
    asked = [
        Asked(
            each.type,
            each.project,
            each.uri or (f"{store.uri}/tensorboard" if each.type == "TensorBoard" and is_local else None),
            run.name,
            f"{run.name}-{marked}",
            run.to_manifest(),
        )
        for each in run.spec.observability.trackers
    ]
    check_trackers(asked)
    return asked


def start_trackers(asked: list[Asked], store: Store, show: Show, step: int, closing: ExitStack) -> None:
    """Sends the rows up to `step`, and from then on every one that is shown."""
    if not asked:
        return
    trackings = [Tracking(each.kind, partial(open_tracker, each), show.note) for each in asked]
    show.trackers = trackings
    for each in trackings:
        closing.callback(each.close)
    keys = [f"metrics/step-{number:06d}.json" for number in range(1, step + 1)]
    for data in store.view_many(keys):
        if not isinstance(data, NotFound):
            row = parse_row(bytes(data))
            for tracking in trackings:
                tracking.row(row)


def tell_the_end(webhooks: list[Webhook], show: Show, uri: str, note: Callable[[str], None]) -> None:
    status: Mapping[str, Any] = show.status.snapshot()
    exit_code = status["exit_code"]
    notify(
        webhooks,
        build_body(status, exit_code=InternalError.exit_code if exit_code is None else exit_code, uri=uri),
        note,
    )
