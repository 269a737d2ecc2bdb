"""`orbit try`: three steps of a run in a temporary folder. What is answered before training, how that is scored, and
how long the run will take. Does not belong here: training (`loop`)."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from orbit_runtime.api.checks import MEASURED_STEPS, keep_pace
from orbit_runtime.cli.output import AsJson, Manifest, Overrides, format_json, format_number
from orbit_runtime.errors import EXIT_DONE, EXIT_STOPPED

if TYPE_CHECKING:
    from orbit_runtime.api.report import Report
    from orbit_runtime.spec import OrbitRun

SHOWN_PROMPTS, SHOWN_ANSWERS, SHOWN_CHARACTERS = 4, 2, 300


def try_run(file: Manifest, overrides: Overrides = None, as_json: AsJson = False) -> int:
    """Try three steps of a run and keep nothing. Shows answers before training with their rewards, how many groups of
    them can be learned from, and how long the run will take."""
    from orbit_runtime.api.report import Report
    from orbit_runtime.api.running import start_run
    from orbit_runtime.observability.logs import configure_logs
    from orbit_runtime.observability.progress import SilentProgress, build_progress
    from orbit_runtime.spec import load_manifest

    manifest, began = load_manifest(file, overrides or []), time.monotonic()
    shown = manifest.spec.observability
    configure_logs(shown.log_level, shown.log_format)
    progress = SilentProgress() if as_json else build_progress(manifest.name, log_format=shown.log_format)
    with tempfile.TemporaryDirectory(prefix="orbit-try-") as folder:
        try:
            result = start_run(shorten(manifest), file.resolve().parent, f"{folder}/{manifest.name}", progress)
        finally:
            progress.close()
        if result.ended == "stopped":
            print("stopped on request; nothing is kept", file=sys.stderr)
            return EXIT_STOPPED
        facts = describe(Report(result.uri), manifest.spec.training.steps, time.monotonic() - began)
    steps, later = facts["steps"], facts["step_seconds"]
    if steps >= MEASURED_STEPS:
        keep_pace(manifest, file.resolve().parent, facts["seconds"] - steps * later, later)
    print(format_json(facts) if as_json else format_trial(facts))
    return EXIT_DONE


def shorten(manifest: OrbitRun) -> OrbitRun:
    """The run's first steps, with nothing that is measured or told besides them."""
    spec, training = manifest.spec, manifest.spec.training
    decay = training.schedule.decay_steps or (None if training.schedule.type == "Constant" else training.steps)
    changes: dict[str, dict[str, Any]] = {
        "training": {
            "steps": min(MEASURED_STEPS, training.steps),
            "stop_when": None,
            "schedule": training.schedule.model_copy(update={"decay_steps": decay}),
        },
        "data": {"validation": None},
        "evaluation": {"every_steps": None},
        "checkpoint": {"resume_from": None},
        "observability": {"metrics_port": -1, "trackers": (), "notify": ()},
    }
    blocks = {name: getattr(spec, name).model_copy(update=fields) for name, fields in changes.items()}
    return manifest.model_copy(update={"spec": spec.model_copy(update=blocks)})


def describe(report: Report, steps: int, seconds: float) -> dict[str, Any]:
    """Args: steps: of the whole run. seconds: all that the first ones took, with start and end."""
    rows = report.rows
    took = [float(row["seconds_total"] or 0.0) for row in rows] or [0.0]
    # The first step is slower than others: much is used for the first time.
    start, later = max(0.0, seconds - sum(took)), statistics.fmean(took[1:] or took)
    answers = report.samples(1) if report.sampled_steps else []
    groups: dict[str, list[float]] = {}
    for each in answers:
        groups.setdefault(each.prompt_id, []).extend([] if each.reward is None else [each.reward])
    rewards, tokens = [reward for group in groups.values() for reward in group], [each.num_tokens for each in answers]
    return {
        "run": report.name,
        "steps": steps,
        "seconds": start + took[0] + later * (steps - 1),
        "start_seconds": start,
        "step_seconds": later,
        "answers": [{**asdict(each), "prompt": each.prompt, "completion": each.completion} for each in answers],
        "groups": len(groups),
        "groups_with_signal": sum(len(set(group)) > 1 for group in groups.values()),
        "reward": {
            "mean": statistics.fmean(rewards), "std": statistics.pstdev(rewards), "low": min(rewards),
            "high": max(rewards),
        } if rewards else None,
        "failed": dict(Counter(each.outcome for each in answers if each.reward is None)),
        "tokens": {"mean": statistics.fmean(tokens), "max": max(tokens)} if tokens else None,
        "cut_off": sum(each.finish_reason == "length" for each in answers),
        "loss": rows[0]["loss"] if rows else None,
        "warnings": list(report.warnings),
    }  # fmt: skip


def format_trial(facts: Mapping[str, Any]) -> str:
    """A few answers, then what all of them come to."""
    from orbit_runtime.observability.progress import format_seconds

    by_prompt: dict[str, list[Mapping[str, Any]]] = {}
    for each in facts["answers"]:
        by_prompt.setdefault(each["prompt_id"], []).append(each)
    lines = [line for group in list(by_prompt.values())[:SHOWN_PROMPTS] for line in _format_group(group)]
    if reward := facts["reward"]:
        failed, tokens = facts["failed"], facts["tokens"]
        spread = f"(±{reward['std']:.3g}, from {reward['low']:.4g} to {reward['high']:.4g})"
        lines += [
            f"before training: {len(facts['answers'])} answers to {facts['groups']} prompts",
            f"reward   {reward['mean']:.4g} {spread}"
            + "".join(f"; {count} without one: {outcome}" for outcome, count in failed.items()),
            f"signal   {facts['groups_with_signal']} of {facts['groups']} groups have answers of different rewards; "
            "the others teach nothing",
            f"length   {tokens['mean']:.1f} tokens, {tokens['max']} at most; {facts['cut_off']} answers were cut off",
        ]
    else:
        lines.append(f"before training: loss {format_number(facts['loss'])}; demonstrations are not sampled")
    lines += [f"warning: {warning}" for warning in facts["warnings"]]
    whole, start = format_seconds(facts["seconds"]), format_seconds(facts["start_seconds"])
    return "\n".join([*lines, f"{facts['steps']} steps, about {whole}, {start} of it start; evaluations not counted"])


def _format_group(group: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [_quote(group[0]["prompt"])]
    for each in group[:SHOWN_ANSWERS]:
        reward = each["outcome"] if each["reward"] is None else f"{each['reward']:.4g}"
        lines.append(f"  reward {reward}, {each['num_tokens']} tokens: {_quote(each['completion'])}")
    return [*lines, ""]


def _quote(text: str) -> str:
    """In one line, whatever it holds."""
    return json.dumps(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…", ensure_ascii=False)
