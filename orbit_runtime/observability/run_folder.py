"""Reads a run folder in any state: finished, in progress, or left by `kill -9`.

Belongs here: finding and parsing what a run wrote, tolerating what does not exist yet.
Does not belong here: judging it (`report`), drawing it (`report_html`), or writing anything.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Buffer, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from orbit_runtime.errors import StorageError
from orbit_runtime.observability.metrics import MetricsRow, parse_row, row_digest
from orbit_runtime.observability.samples import File
from orbit_runtime.storage.store import NotFound

Json = Mapping[str, Any]
MAX_MANIFESTS = 20
"""Number of the newest checkpoints and adapters read; a large model's manifest lists every tensor."""


class FolderSource(Protocol):
    """The part of `storage.Store` that a report needs."""

    @property
    def uri(self) -> str: ...

    def get(self, key: str) -> bytes: ...

    def list(self, prefix: str = "") -> Sequence[str]: ...

    def view_many(self, keys: Sequence[str]) -> Sequence[Buffer | NotFound]: ...

    def size(self, key: str) -> int: ...

    def get_range(self, key: str, start: int, end: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class BestVersion:
    """A kept adapter, and what its evaluation found. Example: `BestVersion(12, "held-out", 0.801)`"""

    step: int
    """The adapter's version as well."""
    evaluation: str
    value: float


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Everything from which a report is made."""

    uri: str
    run: Json
    """`run.json`; empty if it was never written."""
    rows: tuple[MetricsRow, ...]
    checkpoints: tuple[Json, ...]
    """Manifests, newest first."""
    adapters: tuple[Json, ...]
    """Manifests, newest first."""
    heartbeat: Json | None
    """The newest execution's last sign of life."""
    executions: int
    start: Json
    """Seconds of each stage of the newest start that got as far as its first rollouts; empty if none did."""
    failures: tuple[Json, ...]
    evaluations: tuple[Json, ...] = ()
    """Results on held-out prompts, by step: `evaluation/step-*/summary.json`."""
    rollouts: tuple[File, ...] = ()
    """Rollout files of every step that has them, in order."""
    answers: tuple[File, ...] = ()
    """Answers to the held-out prompts, for every finished evaluation, in order."""
    demonstrated: tuple[Json, ...] = ()
    """Answers before and after training by demonstrations: `answers.json`."""
    row_faults: tuple[str, ...] = ()
    """See the function of this name."""
    best: BestVersion | None = None
    """The best of the evaluated adapters; None if none was evaluated."""

    @property
    def facts(self) -> Json:
        """Facts of the newest checkpoint."""
        return self.checkpoints[0].get("facts", {}) if self.checkpoints else {}

    @property
    def summary(self) -> Json:
        """Counters that the loop keeps from step to step."""
        summary = self.facts.get("summary", {})
        return summary if isinstance(summary, Mapping) else {}


def read_run_folder(source: FolderSource, rows: tuple[MetricsRow, ...] | None = None) -> RunFolder:
    """Reads what exists, except samples. Anything broken counts as absent: a report must not fail on a broken run.

    Args: rows: the rows, if they were already read.
    """
    executions = sorted(source.list("executions"))
    heartbeats = [key for key in executions if key.endswith(".heartbeat.json")]
    failures = sorted(key for key in source.list("failures") if key.endswith(".json"))
    evaluations = read_evaluations(source)
    checkpoints, faults = _read_manifests(source, "checkpoints"), list[str]()
    if rows is None:
        # Read after the checkpoint, which lists rows that were written before it.
        rows = read_rows(source)
        by_step = {int(row.number("step") or 0): row for row in rows}
        stored = {_number(key) for key in source.list("metrics")}
        with suppress(KeyError, ValueError, TypeError, AttributeError):
            faults = row_faults(by_step, checkpoints[0]["facts"] if checkpoints else {}, stored)
    return RunFolder(
        uri=source.uri,
        run=_read_json(source, "run.json") or {},
        rows=rows,
        checkpoints=checkpoints,
        adapters=_read_manifests(source, "adapters"),
        heartbeat=_read_json(source, heartbeats[-1]) if heartbeats else None,
        executions=len(heartbeats),
        start=_read_start(source, [key for key in executions if key.endswith(".start.json")]),
        failures=tuple(failure for key in failures if (failure := _read_json(source, key)) is not None),
        evaluations=tuple(evaluations.values()),
        rollouts=rollout_files(source),
        answers=tuple(File(step, f"evaluation/step-{step:06d}/samples.jsonl.zst") for step in evaluations),
        demonstrated=_read_answers(source),
        row_faults=tuple(faults),
        best=next(iter(find_best(source)), None),
    )


def find_best(source: FolderSource, until: int | None = None) -> list[BestVersion]:
    """The kept adapters that were evaluated, the best first and of equal ones the earlier.

    An evaluation counts for the adapter whose digest it carries, because a step that is trained again may end in
    another. It is compared with those that asked what the newest did.

    Args: until: the last step that counts.
    """
    adapters = {_number(key): key for key in source.list("adapters") if key.endswith("/manifest.json")}
    found = read_evaluations(source, [step for step in adapters if until is None or step <= until])
    if not found:
        return []
    checkpoint = ((_read_json(source, "run.json") or {}).get("resolved") or {}).get("spec", {}).get("checkpoint", {})
    digests = {step: ((_read_json(source, adapters[step]) or {}).get("facts") or {}).get("digest") for step in found}
    ranked = _rank_evaluations(found, checkpoint.get("keepBest") or {})
    return [each for each in ranked if found[each.step].get("adapter_digest") == digests[each.step]]


def find_stop(asked: Json, every: int, evaluations: Mapping[int, Json], losses: Json, step: int) -> str | None:
    """Why `training.stopWhen` ends a run after a step; None if it does not.

    Args:
        asked: `training.stopWhen`.
        every: steps between evaluations.
        evaluations: those of the run's own adapters, by step.
        losses: `ValidationHistory` of a run that learns from demonstrations; empty for others.
    """
    if losses:
        best = BestVersion(losses["best_step"], "the held-out loss", -losses["best"])
    else:
        ranked = _rank_evaluations({at: each for at, each in evaluations.items() if at <= step}, asked)
        best = ranked[0] if ranked else BestVersion(step, "", -math.inf)
    shown, since = f"{abs(best.value) if losses else best.value:.4g}", step - step % every - best.step
    if (enough := asked.get("atLeast")) is not None and best.value >= enough:
        return f"{best.evaluation} was {shown} at step {best.step} (training.stopWhen.atLeast: {enough:g})"
    if math.isfinite(best.value) and since >= asked.get("withoutGainSteps", math.inf):
        moved = "fallen below" if losses else "risen above"
        return f"{best.evaluation} has not {moved} {shown} of step {best.step} for {since} steps (training.stopWhen)"
    return None


def _rank_evaluations(found: Mapping[int, Json], asked: Json) -> list[BestVersion]:
    """What evaluations found, the best first and of equal ones the earlier; only of those that asked what the newest
    did. Args: found: by step, in order. asked: `evaluation` and `metric`."""
    settings: Json = ([*found.values()][-1].get("settings") or {}) if found else {}
    name = asked.get("evaluation") or next(iter(settings), "")
    best = [
        BestVersion(step, name, value)
        for step, each in found.items()
        if (each.get("settings") or {}).get(name) == settings.get(name)
        and (value := _evaluated(each, name, asked.get("metric", "Mean"))) is not None
    ]
    return sorted(best, key=lambda each: (-each.value, each.step))


def _evaluated(summary: Json, environment: str, metric: str) -> float | None:
    """The value by which policies are compared; None if it is no number."""
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        for score in summary["scores"]:
            if score["environment"] == environment:
                passes = score["pass_at"]
                mean = (score["average"] if metric == "Mean" else passes[max(passes, key=int)])["mean"]
                return float(mean) if math.isfinite(mean) else None
    return None


def rollout_files(source: FolderSource) -> tuple[File, ...]:
    """Rollout files of every step that has them, in order."""
    keys = [key for key in source.list("rollouts") if key.endswith(".jsonl.zst")]
    return tuple(File(_number(key), key) for key in sorted(keys, key=_number))


def read_rows(source: FolderSource) -> tuple[MetricsRow, ...]:
    """The rows of all steps in order: `metrics.jsonl`, and steps not yet compacted into it."""
    by_step = add_rows(source, {})
    return tuple(by_step[step] for step in sorted(by_step))


def add_rows(source: FolderSource, known: Mapping[int, MetricsRow]) -> dict[int, MetricsRow]:
    """Rows by step: the known ones and new ones. The newest known rows are read again, because a step's row is stored
    again with the next step's."""
    by_step = {step: known[step] for step in sorted(known)[:-2]}
    if not known:
        for line in (_read(source, "metrics.jsonl") or b"").splitlines():
            _take_row(by_step, line)
    keys = [key for key in source.list("metrics") if key.endswith(".json") and _number(key) not in by_step]
    for found in source.view_many(keys):
        if not isinstance(found, NotFound):
            _take_row(by_step, bytes(found))
    return by_step


def read_stored_rows(source: FolderSource, until: int) -> dict[int, MetricsRow]:
    """Rows by step, up to one, from their own files.

    Raises:
        StorageError: a file is damaged.
    """
    keys = [key for key in source.list("metrics") if key.endswith(".json") and _number(key) <= until]
    rows: dict[int, MetricsRow] = {}
    for key, found in zip(keys, source.view_many(keys), strict=True):
        if not isinstance(found, NotFound):
            _take_row(rows, bytes(found))
        if _number(key) not in rows:
            fix = "restore it from a copy of the run folder, or remove that file; the other rows are unharmed"
            raise StorageError(f"{key} is not the row of a step: the file is damaged", where=source.uri, fix=fix)
    return rows


def row_faults(found: Mapping[int, MetricsRow], facts: Json, stored: Collection[int]) -> list[str]:
    """Sentences about rows up to a checkpoint that are not as the run wrote them.

    Args:
        found: rows by step.
        facts: the checkpoint's; those of earlier versions list no digests.
        stored: steps whose row has a file of its own.
    """
    listed = {int(step): digest for step, digest in facts.get("rows", {}).items()}
    steps = range(min([*listed, *found], default=1), int(facts.get("step", 0)) + 1)
    digests = {step: row_digest(found[step]) for step in listed if step in found}
    faults = {
        "missing or damaged": [step for step in steps if step not in found or (step in listed and step not in stored)],
        "not what the run wrote": [step for step in steps if listed.get(step) != digests.get(step, listed.get(step))],
    }
    return [
        f"rows in metrics/ are {fault}, of steps {', '.join(map(str, wrong[:10]))}{' and others' * (len(wrong) > 10)}: "
        "restore them from a copy of the run folder"
        for fault, wrong in faults.items()
        if wrong
    ]


def _take_row(by_step: dict[int, MetricsRow], line: bytes) -> None:
    with suppress(ValueError, TypeError, OverflowError):
        row = parse_row(line)
        by_step[int(row["step"] or 0)] = row


def _read(source: FolderSource, key: str) -> bytes | None:
    try:
        return source.get(key)
    except NotFound:
        return None


def _read_start(source: FolderSource, keys: Sequence[str]) -> dict[str, float]:
    found = (_read_json(source, keys[-1]) or {}).get("seconds") if keys else None
    if not isinstance(found, Mapping):
        return {}
    return {str(name): float(seconds) for name, seconds in found.items() if isinstance(seconds, int | float)}


def _read_answers(source: FolderSource) -> tuple[Json, ...]:
    found = (_read_json(source, "answers.json") or {}).get("answers")
    return tuple(each for each in found if _is_answer(each)) if isinstance(found, list) else ()


def _is_answer(value: Any) -> bool:
    needed = {"prompt", "expected", "after"}
    return isinstance(value, dict) and needed <= value.keys() and all(isinstance(each, str) for each in value.values())


def _read_json(source: FolderSource, key: str) -> dict[str, Any] | None:
    try:
        value = json.loads(_read(source, key) or b"null")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _read_manifests(source: FolderSource, folder: str) -> tuple[Json, ...]:
    keys = [key for key in source.list(folder) if key.endswith("/manifest.json")]
    manifests = []
    for key in sorted(keys, key=_number, reverse=True)[:MAX_MANIFESTS]:
        manifest = _read_json(source, key)
        if manifest is not None:
            manifests.append({**manifest, "prefix": key.removesuffix("/manifest.json")})
    return tuple(manifests)


def read_evaluations(source: FolderSource, steps: Collection[int] | None = None) -> dict[int, Json]:
    """Summaries by step, in order. Args: steps: those to read; all if None."""
    keys = [key for key in source.list("evaluation") if key.endswith("/summary.json")]
    keys = [key for key in keys if steps is None or _number(key) in steps]
    found = {_number(key): _read_json(source, key) for key in sorted(keys, key=_number)}
    return {step: each for step, each in found.items() if each is not None and isinstance(each.get("scores"), list)}


def read_own_evaluations(source: FolderSource) -> dict[int, Json]:
    """Summaries by step, in order, without those of another adapter than the one that the step's row names: a step
    that is trained again may end in another."""
    found = read_evaluations(source)
    rows: dict[int, MetricsRow] = {}
    for row in source.view_many([f"metrics/step-{step:06d}.json" for step in found]):
        if not isinstance(row, NotFound):
            _take_row(rows, bytes(row))
    return {
        step: each
        for step, each in found.items()
        if step not in rows or rows[step]["adapter_digest"] == each.get("adapter_digest")
    }


def _number(key: str) -> int:
    """The last number in a key: its step or version."""
    found = re.findall(r"\d+", key)
    return int(found[-1]) if found else -1
