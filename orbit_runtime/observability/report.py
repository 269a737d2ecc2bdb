"""A run folder in numbers: the content of `report.json` and the facts that `report.html` draws.

Belongs here: counting, judging how a run ended, warnings derived from the numbers.
Does not belong here: drawing (`report_html`, `plots`) or comparing runs (`compare`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import Any

from orbit_runtime import errors
from orbit_runtime.observability.groups import (
    EMBEDDED_BYTES,
    NEWEST_BYTES,
    GroupPage,
    read_groups,
    read_references,
    spread,
)
from orbit_runtime.observability.metrics import MetricsRow, is_unscored
from orbit_runtime.observability.pairs import BeforeAfter, read_pairs, with_expected
from orbit_runtime.observability.run_folder import FolderSource, RunFolder, read_run_folder
from orbit_runtime.observability.windows import Gain, build_gain
from orbit_runtime.storage.execution import STALE_SECONDS

LOW_RATE = 2e-4
"""Learning rates of adapters that may well be ten times as high."""
FAR, LONGER = 2.0, 2.0
"""Nats per token from the base, and a factor of the answers' length: a policy beyond them may have found a reward's
weakness instead of its task."""
_NOT_IDENTITY = ("checkpoint.", "observability.", "storage.", "training.steps", "rollout.maxRunningRequests")
"""Fields without effect on the numbers, for folders whose `run.json` does not list its identity fields."""


@dataclass(frozen=True, slots=True)
class ReportSamples:
    """The samples that a page shows."""

    before_after: BeforeAfter | None
    """None if no prompt was asked at both ends of the run."""
    steps: tuple[GroupPage, ...]
    """Whole groups of some steps."""


@dataclass(frozen=True, slots=True)
class Report:
    """A run folder and what follows from it. `to_json()` is `report.json`."""

    folder: RunFolder
    status: str
    """`done`, `stopped`, `failed`, `running`, `interrupted` or `empty`."""
    reason: str | None
    """An explanation for the reader, if the status alone says too little."""
    exit_code: int | None
    warnings: tuple[str, ...]
    sampled: ReportSamples | None = None
    """None if samples were not read."""

    @property
    def name(self) -> str:
        return str(self.folder.run.get("name") or self.folder.uri.rstrip("/").rsplit("/", 1)[-1])

    @property
    def title(self) -> str:
        """The name, with the run folder's if that is another."""
        folder = self.folder.uri.rstrip("/").rsplit("/", 1)[-1]
        return self.name if folder == self.name else f"{self.name} in {folder}"

    @property
    def rows(self) -> tuple[MetricsRow, ...]:
        return self.folder.rows

    @property
    def identity(self) -> dict[str, Any]:
        """The fields that change the results, by path."""
        identity = self.folder.run.get("identity")
        if isinstance(identity, Mapping):
            return _flatten(identity)
        return {path: value for path, value in _flatten(self.spec).items() if not path.startswith(_NOT_IDENTITY)}

    @property
    def spec(self) -> Mapping[str, Any]:
        spec = manifest_of(self.folder.run).get("spec", {})
        return spec if isinstance(spec, Mapping) else {}

    @property
    def samples_nothing(self) -> bool:
        """Whether the run learns from demonstrations: it has no engine, so no publish is proven."""
        return bool(self.spec.get("algorithm", {}).get("type") == "SFT")

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Names of the rewards, if there are several, in the manifest's order."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.reward_parts))

    @property
    def headline(self) -> dict[str, Any]:
        """`name, first, last, steps` of the run's main metric, for everyone who shows one.

        It is the held-out loss, before training and at its best; else the evaluation that chooses the best adapter, or
        the first one; else the mean reward of the first `steps` steps and of the last; else the loss.
        """
        name, steps = "loss", None
        curves = evaluation_curves(self.folder.evaluations)
        evaluated = self.folder.best.evaluation if self.folder.best else next(iter(curves), "")
        points = [point["mean"] for point in curves.get(evaluated, ()) if point["mean"] is not None]
        if validated := self.folder.summary.get("validated"):
            name, ends = "held-out loss", [validated["first"], validated["best"]]
        elif points:
            name, ends = evaluated, points
        elif gain := self.gain:
            name, ends, steps = "reward", [gain.first.value, gain.last.value], gain.first.steps
        else:
            name = "reward" if self.is_scored else "loss"
            ends = [row.number("reward_mean" if self.is_scored else "loss") for row in self.rows]
        return {"name": name, "first": ends[0] if ends else None, "last": ends[-1] if ends else None, "steps": steps}

    @property
    def is_scored(self) -> bool:
        """Whether the run samples answers that are rewarded; else it has losses alone."""
        return not (self.folder.summary.get("validated") or is_unscored(self.rows))

    @property
    def described(self) -> str:
        """Example: `tiny-adder (INT4), LoRA of rank 16, GRPO, reward correct, on NVIDIA H100 80GB HBM3`; empty where
        nothing is known."""
        found = {name: self.spec.get(name) or {} for name in ("model", "adapter", "algorithm", "environment")}
        model, rewards = found["model"], [each["name"] for each in found["environment"].get("rewards") or ()]
        uri = str(model.get("uri", "")).rstrip("/").rpartition("/")[2]
        rank = (found["adapter"].get("lora") or {}).get("rank")
        told = [{}, *(self.folder.run.get("rounding") or ())][-1]
        machine = told.get("gpu") or told.get("processor") or self.folder.run.get("device")
        parts = [
            f"{uri} ({model['precision']})" if uri and model.get("precision") else uri,
            f"LoRA of rank {rank}" if rank else found["adapter"].get("type"),
            found["algorithm"].get("type"),
            f"reward {', '.join(rewards)}" if rewards and self.is_scored else "",
            f"on {machine}" if machine else "",
        ]
        return ", ".join(part for part in parts if part)

    @property
    def gain(self) -> Gain | None:
        """Change of the reward between the first steps and the last."""
        return build_gain(self.rows)

    @property
    def published(self) -> str:
        """Folder of the policies in the run folder: adapters or whole models."""
        return "models" if self.spec.get("adapter", {}).get("type") == "Full" else "adapters"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; a number that the run has not produced yet is `None`."""
        rows, summary, facts = self.rows, self.folder.summary, self.folder.facts
        last = rows[-1] if rows else None
        rollout = self.spec.get("rollout", {})
        return {
            "run": self.name,
            "uri": self.folder.uri,
            "status": self.status,
            "reason": self.reason,
            "exit_code": self.exit_code,
            "steps": int(last.number("step") or 0) if last else 0,
            "steps_total": self.spec.get("training", {}).get("steps"),
            "reward_first": rows[0].number("reward_mean") if rows else None,
            "reward_last": last.number("reward_mean") if last else None,
            "reward_best": _largest(row.number("reward_mean") for row in rows),
            "reward_parts": {
                name: {"first": rows[0].reward_parts.get(name), "last": rows[-1].reward_parts.get(name)}
                for name in self.reward_names
            },
            "headline": self.headline,
            "gain": self.gain.to_json() if self.gain else None,
            "evaluation": evaluation_curves(self.folder.evaluations),
            "best": asdict(self.folder.best) if self.folder.best else None,
            "publishes": summary.get("publishes", 0),
            "publishes_proven": summary.get("publishes_proven", 0),
            "base_digest_before": summary.get("base_digest_before") or self.folder.run.get("base_digest"),
            "base_digest_after": summary.get("base_digest_after"),
            "adapter_digest": facts.get("adapter_digest") or (last["adapter_digest"] if last else None),
            "published": self.published,
            "policy_version": facts.get("policy_version", last["policy_version"] if last else None),
            "trainable_parameters": summary.get("trainable_parameters"),
            "resumed": summary.get("resumed", 0),
            "executions": self.folder.executions,
            "start_seconds": dict(self.folder.start),
            "seconds": _total(row.number("seconds_total") for row in rows),
            "tokens": int(_total(row.number("tokens") for row in rows)),
            "outcomes": {
                name: int(_total(row.number(f"reward_{name}") for row in rows))
                for name in ("value", "wrong", "timeout", "crash")
            },
            "parity": {
                "mean_max": _largest(row.number("parity_mean") for row in rows),
                "max_max": _largest(row.number("parity_max") for row in rows),
                "limit": last.number("parity_limit") if last else None,
                "top1_min": min((x for row in rows if (x := row.number("parity_top1")) is not None), default=None),
                "mean_max_replayed": _largest(row.number("parity_mean_replayed") for row in rows),
                "mean_max_unreplayed": _largest(row.number("parity_mean_unreplayed") for row in rows),
                "router_agreement": last.number("router_agreement") if last else None,
            },
            "engine_sleep": summary.get("sleep"),
            # Other engines start no servers, so there is no transport.
            "adapter_transport": rollout.get("adapterTransport") if rollout.get("engine") == "SGLang" else None,
            "deterministic": bool(rollout.get("deterministic", False)),
            "last_checkpoint": self.folder.checkpoints[0]["prefix"] if self.folder.checkpoints else None,
            "warnings": list(self.warnings),
            "failures": [dict(failure) for failure in self.folder.failures],
            "versions": self.folder.run.get("versions", {}),
        }


def build_report(
    source: FolderSource,
    *,
    ended: str | None = None,
    now: float | None = None,
    samples: bool = True,
    rows: tuple[MetricsRow, ...] | None = None,
    newest_only: bool = False,
) -> Report:
    """Reads a run folder in any state.

    Args:
        ended: how the run ended, given by the loop that still holds the folder; by default from the newest execution.
        samples: whether to read the rollouts and answers that a page shows too.
        rows: the rows, if they were already read.
        newest_only: whether to read only the newest step's groups, for a page that requests those of other steps.
    """
    folder = read_run_folder(source, rows)
    status, reason, code = _judge(folder, ended, time.time() if now is None else now)
    return Report(
        folder, status, reason, code, _warnings(folder), _sampled(source, folder, newest_only) if samples else None
    )


def _sampled(source: FolderSource, folder: RunFolder, newest_only: bool) -> ReportSamples:
    before_after = read_pairs(source, folder.answers, folder.rollouts)
    if before_after is not None and not before_after.held_out:
        before_after = with_expected(before_after, partial(read_references, source))
    files = folder.rollouts[-1:] if newest_only else spread(folder.rollouts)
    most = NEWEST_BYTES if newest_only else EMBEDDED_BYTES // max(1, len(files))
    pages = (read_groups(source, file, read_references(source, file), most_bytes=most) for file in files)
    return ReportSamples(before_after, tuple(page for page in pages if page.groups))


def evaluation_curves(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Environment → results of each evaluation, by step; `change` is relative to the first, prompt by prompt."""
    curves: dict[str, list[dict[str, Any]]] = {}
    for each in evaluations:
        for score in each["scores"]:
            passes, name = score["pass_at"], score["environment"]
            point = {
                "step": each["step"],
                **{field: score["average"][field] for field in ("mean", "low", "high", "prompts")},
                "samples": score["samples"],
                "unscored": score["failed"],
                "pass_at": {k: found["mean"] for k, found in passes.items()},
                "tokens": score["prompt_tokens"] + score["completion_tokens"],
                "cost": score["cost"],
                "change": each.get("change", {}).get(name),
            }
            curves.setdefault(name, []).append(point)
    return curves


def manifest_of(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """The manifest in `run.json`, with every `Auto` resolved."""
    manifest = run.get("resolved", run)
    return manifest if isinstance(manifest, Mapping) else {}


def _judge(folder: RunFolder, ended: str | None, now: float) -> tuple[str, str | None, int | None]:
    beat = folder.heartbeat or {}
    if ended is None and beat.get("state") == "ended":
        ended = str(beat.get("reason"))
    if ended is not None:
        return _judge_ended(ended, folder)
    if not beat and not folder.rows:
        return "empty", "nothing has run here yet", None
    age = now - float(beat.get("at", 0.0))
    if beat and age <= STALE_SECONDS:
        return "running", f"last sign of life {max(0.0, age):.0f} s ago", None
    return "interrupted", "the process ended without recording it; start it again to continue", None


def _judge_ended(ended: str, folder: RunFolder) -> tuple[str, str | None, int | None]:
    if ended == "done":
        return "done", None, errors.EXIT_DONE
    if ended == "exhausted":
        return "done", "the prompts are used up (data.epochs)", errors.EXIT_DONE
    if ended.startswith("converged"):
        # Earlier versions did not write why.
        return "done", ended.partition(": ")[2] or "the held-out loss no longer improved", errors.EXIT_DONE
    if ended == "stopped":
        return "stopped", "on request; start it again to continue", errors.EXIT_STOPPED
    kind = getattr(errors, ended, None)
    code = kind.exit_code if isinstance(kind, type) and issubclass(kind, errors.OrbitError) else 70
    said = [str(failure.get("message")) for failure in folder.failures if failure.get("error") == ended]
    return "failed", said[-1] if said else ended, code


def _warnings(folder: RunFolder) -> tuple[str, ...]:
    """Warnings of the run itself, then those that only the whole run reveals."""
    found = [*folder.row_faults, *(str(warning) for warning in folder.summary.get("warnings", ()))]
    summary, rows = folder.summary, folder.rows
    publishes, proven = summary.get("publishes", 0), summary.get("publishes_proven", 0)
    if proven < publishes:
        found.append(f"{publishes - proven} of {publishes} publishes were not proven")
    before, after = summary.get("base_digest_before"), summary.get("base_digest_after")
    if before and after and before != after:
        found.append("the frozen base changed during the run")
    flat = [row.number("reward_mean") for row in rows if row.number("reward_std") == 0.0]
    solved = flat.count(1.0)
    if solved:
        found.append(f"in {solved} of {len(rows)} steps all rewards were 1: nothing was left to learn")
    if len(flat) > solved:
        found.append(f"{len(flat) - solved} of {len(rows)} steps had the same reward for every sample: no gradient")
    spec, gain = manifest_of(folder.run).get("spec") or {}, build_gain(rows)
    is_flat = gain is not None and gain.margin is not None and abs(gain.difference) <= gain.margin and not solved
    if gain is not None and gain.margin is not None and gain.difference > gain.margin:
        found += _runaways(rows, gain.first.steps)
    rate, adapter = spec.get("training", {}).get("learningRate") or 1.0, spec.get("adapter", {})
    # A run that goes on from an adapter soon loses at a high rate what that one had learned.
    if is_flat and rate <= LOW_RATE and adapter.get("type") != "Full" and not adapter.get("initFrom"):
        found.append(
            f"the reward did not rise beyond its noise at a learning rate of {rate:g}; adapters usually take more, up "
            f"to 2e-3: try training.learningRate {10 * rate:g}"
        )
    for outcome, words in (("timeout", "ran out of time"), ("crash", "crashed")):
        count = int(_total(row.number(f"reward_{outcome}") for row in rows))
        if count:
            found.append(f"{count} rewards {words}: masked out, not scored 0")
    cut = rows[-1].number("truncated_fraction") if rows else None
    if cut is not None and cut > 0.2:
        found.append(f"{cut:.0%} of the last step's completions were cut off by maxNewTokens")
    return tuple(dict.fromkeys(found))


def _runaways(rows: Sequence[MetricsRow], steps: int) -> list[str]:
    """Warnings of a run whose reward rose: what else moved far between its first and its last steps."""
    ends = {
        name: [[x for row in part if (x := row.number(name)) is not None] for part in (rows[:steps], rows[-steps:])]
        for name in ("response_tokens_mean", "kl_base")
    }
    found = []
    first, last = (fmean(each or [0.0]) for each in ends["response_tokens_mean"])
    if min(first, last) > 0 and not 1 / LONGER < last / first < LONGER:
        found.append(f"answers went from {first:.3g} to {last:.3g} tokens")
    if (drift := fmean(ends["kl_base"][1] or [0.0])) > FAR:
        found.append(f"the policy moved {drift:.2g} nats per token from the base")
    return [f"the reward rose while {each}: read some answers, they may please the reward alone" for each in found]


def _flatten(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        where = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value:
            flat.update(_flatten(value, where))
        else:
            flat[where] = value
    return flat


def _total(values: Iterable[float | None]) -> float:
    return sum(value for value in values if value is not None)


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
