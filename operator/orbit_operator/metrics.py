"""The operator's own metrics, and those of every run.

Belongs here: names, labels, counting. Does not belong here: serving them (`health`), or what a run's pod measures.
A run's series are rendered once for each new status and only joined at a scrape: with a thousand runs, rendering at
the scrape would block everything else for a second. The series of a run disappear with the run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from itertools import batched
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from orbit_operator.timestamps import read_time

OPERATOR, RUN = "orbit_operator_", "orbit_run_"
TRUTHS = ("True", "False", "Unknown")
SPENT = (("user", "userRetries"), ("infra", "infraRestarts"), ("free", "freeRestarts"))
USES = ("useful", "lost", "waiting")
PASS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 10.0)

WAIT_SECONDS = (*PASS_SECONDS, 30.0, 60.0, 120.0, 300.0, 600.0)

Labels = Sequence[str]
Sample = tuple[str, Labels, float]
"""Name of the series, values of its labels after namespace and run, value."""

RUN_SERIES: dict[str, tuple[Labels, str]] = {
    "info": (("model", "precision", "adapter", "queue", "node"), "1 for each run."),
    "phase": (("phase", "reason", "owner"), "1 for the present one; owner must act."),
    "status_condition": (("condition", "status"), "1 for the present status of a condition, 0 for the others."),
    "attempt": ((), "Number of the newest attempt."),
    "attempts_total": (("class",), "Attempts that ended without success, by budget."),
    "last_end_timestamp_seconds": (("class", "reason", "owner"), "When the newest ended attempt ended."),
    "finished_timestamp_seconds": ((), "When the run ended for good."),
    "gpu_seconds_total": (("kind",), "GPUs times seconds, by what they were used for."),
    "gpus": ((), "GPUs that the run holds now."),
    "last_checkpoint_timestamp_seconds": ((), "When the newest durable checkpoint was first seen."),
}
"""The series of every run: labels besides namespace and run, and the help text."""


RunText = tuple[bytes, ...]
"""All samples of one run in Prometheus' text format, in the order of `RUN_SERIES`."""
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Metrics:
    """One registry; `runs` is filled by reconciling and read at each scrape."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.runs: dict[tuple[str, str], RunText] = {}
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.info = Gauge(OPERATOR + "info", "1; its version.", ["version"], registry=registry)
        self.info.labels(_version()).set(1)
        self.reconcile = Histogram(
            OPERATOR + "reconcile_seconds", "Time of one pass over one run.", buckets=PASS_SECONDS, registry=registry
        )
        self.waited = Histogram(
            OPERATOR + "queue_seconds", "Time that a run waited for a worker.", buckets=WAIT_SECONDS,
            registry=registry,
        )  # fmt: skip
        self.errors = Counter(OPERATOR + "reconcile_errors", "Passes that failed and are retried.", registry=registry)
        self.requests = Counter(
            OPERATOR + "api_requests", "Calls of the API server.", ["verb", "resource", "code"], registry=registry
        )
        self.polls = Counter(OPERATOR + "polls", "Polls of pods.", ["outcome"], registry=registry)
        self.queue = Gauge(OPERATOR + "queue_depth", "Runs that wait for a worker.", registry=registry)
        self.event = Gauge(
            OPERATOR + "last_event_timestamp_seconds",
            "When the operator last heard from the cluster.",
            registry=registry,
        )
        self.events = Counter(
            OPERATOR + "events", "Objects that listing and watching brought.", ["news"], registry=registry
        )
        self.leader = Gauge(OPERATOR + "lease_held", "1 while this operator holds the Lease.", registry=registry)
        self.current = Gauge(OPERATOR + "watch_current", "0 while watching lags behind.", registry=registry)
        self.refused = Gauge(
            OPERATOR + "namespace_refused", "1 for a watched namespace that the operator may not read.", ["watched"],
            registry=registry,
        )  # fmt: skip
        self.crd = Gauge(
            OPERATOR + "crd_outdated", "1 if the served CRD lacks something or differs.", registry=registry
        )

    def count_request(self, verb: str, resource: str, status: int, _seconds: float) -> None:
        self.requests.labels(verb, resource, str(status)).inc()

    def mark_refused(self, namespace: str, is_refused: bool) -> None:
        if is_refused:
            self.refused.labels(namespace).set(1.0)
        else:
            self.refused.remove(namespace)

    def mark_event(self) -> None:
        self.event.set(time.time())

    def count_event(self, is_news: bool | None) -> None:
        """Counts a received event. `None` stands for anything that is not an object: it only shows that the watch is
        alive.
        """
        self.mark_event()
        if is_news is not None:
            self.events.labels("yes" if is_news else "no").inc()

    def render(self) -> Iterator[bytes]:
        """Yields the text in parts: with a thousand runs it is 5 MB."""
        yield generate_latest(self.registry)
        yield from _render_runs(list(self.runs.values()))


def build_text(namespace: str, run: str, spec: Mapping[str, Any], status: Mapping[str, Any], gpus: int) -> RunText:
    """A run's samples, from its spec and its newest status. `gpus`: the number that its pod requests."""
    lines: dict[str, list[str]] = {name: [] for name in RUN_SERIES}
    for name, values, number in _samples(spec, status, gpus):
        texts = (namespace, run, *values)
        if any(map(_needs_escape, texts)):
            texts = tuple(each.translate(_ESCAPES) for each in texts)
        lines[name].append(f"{_HEADS[name].format(*texts)} {number!r}\n")
    return tuple("".join(each).encode() for each in lines.values())


def _build_head(name: str, labels: Labels) -> str:
    """A series with its labels ordered by name, and a placeholder for each value, numbered from namespace and run."""
    places = {label: place for place, label in enumerate(("namespace", "run", *labels))}
    text = ",".join(f'{label}="{{{place}}}"' for label, place in sorted(places.items()))
    return f"{RUN}{name}{{{{{text}}}}}"


_HEADS = {name: _build_head(name, labels) for name, (labels, _) in RUN_SERIES.items()}
_needs_escape = re.compile(r'[\\"\n]').search


def _render_runs(runs: Sequence[RunText]) -> Iterator[bytes]:
    for index, (name, (_, help_text)) in enumerate(RUN_SERIES.items()):
        yield f"# HELP {RUN}{name} {help_text}\n# TYPE {RUN}{name} gauge\n".encode()
        for some in batched(runs, 100):
            yield b"".join(run[index] for run in some)


def _samples(spec: Mapping[str, Any], status: Mapping[str, Any], gpus: int) -> Iterator[Sample]:
    def word(block: str, name: str) -> str:
        return str((spec.get(block) or {}).get(name) or "")

    attempts = status.get("attempts") or []
    node = str(status.get("node") or "")
    names = (word("model", "uri"), word("model", "precision"), word("adapter", "type"), word("lifecycle", "queueName"))
    yield "info", (*names, node), 1.0
    where = [str(status.get(name) or "") for name in ("phase", "reason", "whoActs")]
    yield "phase", tuple(where), 1.0
    for condition in status.get("conditions") or ():
        for truth in TRUTHS:
            yield "status_condition", (condition["type"], truth), float(condition["status"] == truth)
    none: Labels = ()
    yield "attempt", none, float(status.get("attempt") or 0)
    for name, field in SPENT:
        yield "attempts_total", (name,), float(status.get(field) or 0)
    for use in USES:
        yield "gpu_seconds_total", (use,), float((status.get("gpuSeconds") or {}).get(use) or 0)
    holds = bool(attempts) and "ending" not in attempts[-1] and "scheduleTime" in attempts[-1]
    yield "gpus", none, float(gpus if holds else 0)
    ended = [attempt["ending"] for attempt in attempts if "ending" in attempt]
    if ended:
        last = ended[-1]
        what = (str(last.get("budget", "")).lower(), str(last.get("reason", "")), str(last.get("whoActs", "")))
        yield from _moment("last_end_timestamp_seconds", what, last.get("time"))
    yield from _moment("finished_timestamp_seconds", none, status.get("completionTime"))
    yield from _moment("last_checkpoint_timestamp_seconds", none, (status.get("checkpoint") or {}).get("time"))


def _moment(series: str, labels: Labels, text: object) -> Iterator[Sample]:
    seconds = read_time(text)
    if seconds is not None:
        yield series, labels, seconds


def _version() -> str:
    try:
        return metadata.version("orbit-rl")
    except metadata.PackageNotFoundError:
        return "unknown"
