"""Reading a run folder as it stands: finished, under way, or left behind by `kill -9`.

Belongs here: finding and parsing what a run wrote, forgiving what is not there yet.
Does not belong here: judging it (`report`), drawing it (`report_html`), or writing anything.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from orbit_runtime.errors import OrbitError
from orbit_runtime.observability.metrics import MetricsRow, parse_row
from orbit_runtime.storage.store import NotFound

Json = Mapping[str, Any]
MAX_ROLLOUT_BYTES = 1 << 28
"""Of a step's decompressed rollouts; the rest of a longer step is not shown."""


class Source(Protocol):
    """What a report needs of `storage.Store`."""

    @property
    def uri(self) -> str: ...

    def get(self, key: str) -> bytes: ...

    def list(self, prefix: str = "") -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class Shown:
    """One sampled completion, for people. Its text is untrusted."""

    prompt_id: str
    sample_index: int
    prompt: str
    completion: str
    answer: str | None
    """What the prompt's row expects, where it says so."""
    reward: float | None
    outcome: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Everything that a report is made of."""

    uri: str
    run: Json
    """`run.json`; empty when it was never written."""
    rows: tuple[MetricsRow, ...]
    checkpoints: tuple[Json, ...]
    """Manifests, newest first."""
    adapters: tuple[Json, ...]
    """Manifests, newest first."""
    heartbeat: Json | None
    """The newest execution's last sign of life."""
    executions: int
    failures: tuple[Json, ...]
    first: tuple[Shown, ...]
    last: tuple[Shown, ...]
    first_step: int | None
    last_step: int | None
    evaluations: tuple[Json, ...] = ()
    """What held-out prompts said of the policy, by step: `evaluation/step-*/summary.json`."""

    @property
    def facts(self) -> Json:
        """Facts of the newest checkpoint."""
        return self.checkpoints[0].get("facts", {}) if self.checkpoints else {}

    @property
    def summary(self) -> Json:
        """What the loop counts from step to step."""
        summary = self.facts.get("summary", {})
        return summary if isinstance(summary, Mapping) else {}


def read_run_folder(source: Source, *, samples: int = 6) -> RunFolder:
    """Reads what is there. What is missing or broken counts as absent: a report must not fail on a broken run.

    Args:
        samples: how many rollouts of the first and of the last step; 0 leaves them unread.
    """
    rows = read_rows(source)
    rollouts = sorted(key for key in source.list("rollouts") if key.endswith(".jsonl.zst")) if samples else []
    heartbeats = sorted(key for key in source.list("executions") if key.endswith(".heartbeat.json"))
    failures = sorted(key for key in source.list("failures") if key.endswith(".json"))
    first = _read_rollouts(source, rollouts[0]) if rollouts else []
    last = _read_rollouts(source, rollouts[-1]) if len(rollouts) > 1 else []
    shared = {shown.prompt_id for shown in first} & {shown.prompt_id for shown in last}
    return RunFolder(
        uri=source.uri,
        run=_read_json(source, "run.json") or {},
        rows=rows,
        checkpoints=_read_manifests(source, "checkpoints"),
        adapters=_read_manifests(source, "adapters"),
        heartbeat=_read_json(source, heartbeats[-1]) if heartbeats else None,
        executions=len(heartbeats),
        failures=tuple(failure for key in failures if (failure := _read_json(source, key)) is not None),
        first=_choose(first, shared, samples),
        last=_choose(last, shared, samples),
        first_step=_number(rollouts[0]) if rollouts else None,
        last_step=_number(rollouts[-1]) if len(rollouts) > 1 else None,
        evaluations=_read_evaluations(source),
    )


def read_rows(source: Source) -> tuple[MetricsRow, ...]:
    """The rows of all steps in order: `metrics.jsonl`, and the steps that are not compacted into it yet."""
    by_step: dict[int, MetricsRow] = {}
    for line in (_read(source, "metrics.jsonl") or b"").splitlines():
        _take_row(by_step, line)
    for key in source.list("metrics"):
        if key.endswith(".json") and _number(key) not in by_step:
            _take_row(by_step, _read(source, key) or b"")
    return tuple(by_step[step] for step in sorted(by_step))


def _take_row(by_step: dict[int, MetricsRow], line: bytes) -> None:
    try:
        row = parse_row(line)
    except (ValueError, AttributeError):
        return
    step = row.number("step")
    if step is not None:
        by_step[int(step)] = row


def _read(source: Source, key: str) -> bytes | None:
    try:
        return source.get(key)
    except NotFound:
        return None


def _read_json(source: Source, key: str) -> dict[str, Any] | None:
    try:
        value = json.loads(_read(source, key) or b"null")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _read_manifests(source: Source, folder: str) -> tuple[Json, ...]:
    keys = [key for key in source.list(folder) if key.endswith("/manifest.json")]
    manifests = []
    for key in sorted(keys, key=_number, reverse=True):
        manifest = _read_json(source, key)
        if manifest is not None:
            manifests.append({**manifest, "prefix": key.removesuffix("/manifest.json")})
    return tuple(manifests)


def _read_evaluations(source: Source) -> tuple[Json, ...]:
    keys = [key for key in source.list("evaluation") if key.endswith("/summary.json")]
    found = (_read_json(source, key) for key in sorted(keys, key=_number))
    return tuple(each for each in found if each is not None and isinstance(each.get("scores"), list))


def _number(key: str) -> int:
    """The last number in a key: its step or version."""
    found = re.findall(r"\d+", key)
    return int(found[-1]) if found else -1


def _read_rollouts(source: Source, key: str) -> list[Shown]:
    import zstandard

    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(source.get(key))) as reader:
            text = reader.read(MAX_ROLLOUT_BYTES)
    except (zstandard.ZstdError, OrbitError):
        return []
    # A rollout says what was answered; what its prompt expects stands beside the step's rollouts.
    answers = _read_json(source, f"{key.removesuffix('.jsonl.zst')}.references.json") or {}
    references = {prompt: str(answer) for prompt, answer in answers.items()}
    shown = []
    for line in text.splitlines():
        try:
            shown.append(_build_shown(json.loads(line), references))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return shown


def _build_shown(record: Mapping[str, Any], references: Mapping[str, str]) -> Shown:
    turns = record["turns"]
    spoken = [turn["text"] for turn in turns if turn["role"] == "assistant"]
    asked = [turn["text"] for turn in turns if turn["role"] != "assistant"]
    return Shown(
        prompt_id=str(record["prompt_id"]),
        sample_index=int(record["sample_index"]),
        prompt="\n".join(asked),
        completion="\n".join(spoken),
        answer=references.get(str(record["prompt_id"])),
        reward=record["reward"],
        outcome=str(record["outcome"]),
        finish_reason=str(record["finish_reason"]),
    )


def _choose(shown: list[Shown], shared: set[str], count: int) -> tuple[Shown, ...]:
    """One sample each of `count` prompts, those first that the other side has too, spread over the step."""
    if not shown:
        return ()
    one_each = {entry.prompt_id: entry for entry in reversed(shown)}
    common = [entry for prompt, entry in sorted(one_each.items()) if prompt in shared]
    other = [entry for prompt, entry in sorted(one_each.items()) if prompt not in shared]
    ordered = common if len(common) >= count else [*common, *other]
    stride = max(1, len(ordered) // count)
    return tuple(ordered[::stride][:count])
