"""Reports outside the run: to trackers after every step, to webhooks at the end.

Belongs here: building both from the manifest, and which rows a start sends again. Does not belong here: their kinds and
protocols (`observability`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from orbit_runtime.errors import InternalError
from orbit_runtime.loop.keep import step_name
from orbit_runtime.loop.measure import evaluation_fields, read_evaluation
from orbit_runtime.loop.show import Show
from orbit_runtime.observability.metrics import MetricsRow, build_row, parse_row
from orbit_runtime.observability.notify import Webhook, build_body, notify
from orbit_runtime.observability.trackers import Asked, Tracking, check_trackers, open_tracker
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage import NotFound, Store

ROWS_READ = 256


def asked_trackers(run: OrbitRun, store: Store, started: float) -> list[Asked]:
    """Args: started: when the run first began, the same at each start.

    Raises:
        UnsupportedError: a tracker cannot work. CredentialsError: a tracker has no key.
    """
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
    check_trackers(asked, os.environ)
    return asked


def start_trackers(asked: list[Asked], store: Store, show: Show, step: int, closing: ExitStack) -> None:
    """Sends all rows up to `step`, and from then on every row that is shown."""
    earlier = partial(_rows_until, store, step)
    show.trackers = [Tracking(each.kind, partial(open_tracker, each), show.note, earlier) for each in asked]
    for tracking in show.trackers:
        closing.callback(tracking.close)


def _rows_until(store: Store, step: int) -> Iterator[MetricsRow]:
    """Yields the evaluation before the first step, which has no row, then the rows, reading `ROWS_READ` at a time."""
    if (found := read_evaluation(store, 0)) is not None:
        yield build_row(step=0, **evaluation_fields(found))
    for first in range(1, step + 1, ROWS_READ):
        keys = [f"metrics/{step_name(number)}.json" for number in range(first, min(step + 1, first + ROWS_READ))]
        for data in store.view_many(keys):
            if not isinstance(data, NotFound):
                yield parse_row(bytes(data))


def tell_the_end(webhooks: list[Webhook], show: Show, uri: str, kind: type[BaseException] | None) -> None:
    """Args: kind: type of the error that ended the run. Nothing is sent after a second interrupt: the user is there."""
    if kind is not None and issubclass(kind, KeyboardInterrupt):
        return
    status: Mapping[str, Any] = show.status.snapshot()
    exit_code = status["exit_code"]
    body = build_body(status, exit_code=InternalError.exit_code if exit_code is None else exit_code, uri=uri)
    notify(webhooks, body, show.note)
