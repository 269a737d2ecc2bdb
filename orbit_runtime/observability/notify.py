"""Webhooks: POSTs to an address how a run ended. No failure here changes how the run ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orbit_runtime.errors import EXIT_DONE, EXIT_STOPPED, DivergedError, GateError, UsageError

if TYPE_CHECKING:
    from orbit_runtime.spec import run as given

ATTEMPTS, TIMEOUT_SECONDS, PAUSE_SECONDS = 3, 5.0, 1.0
GATES = (GateError.exit_code, DivergedError.exit_code)


@dataclass(frozen=True)
class Webhook:
    """An address, and the events to send to it."""

    url: str
    events: Sequence[str]
    name: str
    """Name in messages: the manifest's field, never the address, which may be a secret."""


def build_webhooks(asked: Sequence[given.Webhook], environ: Mapping[str, str]) -> list[Webhook]:
    """Webhooks from `spec.observability.notify`. Raises UsageError if a variable is not set or is not an address."""
    found = []
    for index, each in enumerate(asked):
        where = f"spec.observability.notify[{index}]"
        url = each.url
        if each.url_env is not None:
            url, where = environ.get(each.url_env, ""), f"{where}.urlEnv"
            if not url.startswith(("http://", "https://")):
                problem = "holds no address that begins with https://" if url else "is not set"
                fix = "set it, on a cluster by a secret of spec.placement.envFromSecrets"
                raise UsageError(f"the variable {each.url_env} {problem}", where=where, fix=fix)
        assert url is not None, "the spec asks for one of the two"
        found.append(Webhook(url, each.events, where))
    return found


def event_of(exit_code: int) -> given.Event:
    if exit_code == EXIT_DONE:
        return "Done"
    if exit_code == EXIT_STOPPED:
        return "Stopped"
    return "Gate" if exit_code in GATES else "Failed"


def build_body(status: Mapping[str, Any], *, exit_code: int, uri: str) -> dict[str, Any]:
    """The body; Slack, Mattermost and Google Chat show its `text`."""
    run, event = status["run"], event_of(exit_code)
    step, total, message = status.get("step"), status.get("total"), status.get("message")
    text = f"Orbit run {run}: {event.lower()} after step {step} of {total}"
    return {
        "text": f"{text}: {message}" if message else text,
        "event": event,
        "run": run,
        "namespace": status.get("namespace"),
        "exit_code": exit_code,
        "message": message,
        "step": step,
        "total": total,
        "reward_mean": status.get("reward"),
        "uri": uri,
        "report": f"{uri.rstrip('/')}/report.html",
    }


def notify(
    webhooks: Sequence[Webhook],
    body: Mapping[str, Any],
    note: Callable[[str], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Notifies the webhooks for this event; one that does not answer is noted, after about 20 s at most."""
    for each in webhooks:
        if body["event"] not in each.events:
            continue
        problem = ""
        for attempt in range(ATTEMPTS):
            problem, again = _post(each.url, body)
            if not again:
                break
            if attempt + 1 < ATTEMPTS:
                sleep(PAUSE_SECONDS * 2**attempt)
        if problem:
            note(f"warning: {each.name} could not be notified of the run's end: {problem}")


def _post(url: str, body: Mapping[str, Any]) -> tuple[str, bool]:
    """An error, empty if there is none, and whether to retry. Contains no part of the address."""
    import httpx

    try:
        answer = httpx.post(url, json=body, headers={"User-Agent": "orbit-rl"}, timeout=TIMEOUT_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return type(error).__name__, isinstance(error, httpx.TransportError)
    if answer.is_success:
        return "", False
    return f"HTTP {answer.status_code}", answer.status_code == 429 or answer.status_code >= 500
