"""The page of an evaluation: scores with intervals, models against each other, answers side by side."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile
from statistics import pvariance
from typing import Any

from orbit_runtime.evaluation.records import EvalSample
from orbit_runtime.evaluation.summary import Score, Summary, subject_order
from orbit_runtime.observability import plots
from orbit_runtime.observability.charts import Chart
from orbit_runtime.observability.report_html import render_page

MAX_PROMPTS = 40
MAX_BEGINNING = 70
"""Characters of a prompt shown beside its name, so that a folded list can be read."""


@dataclass(frozen=True)
class _ShownSample:
    subject: str
    reward: float | None
    outcome: str
    failure: Any
    reasons: Sequence[str]
    answers: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class _ShownPrompt:
    name: str
    text: str
    expected: str
    samples: Sequence[_ShownSample]

    @property
    def beginning(self) -> str:
        words = " ".join(self.text.split())
        return words if len(words) <= MAX_BEGINNING else f"{words[:MAX_BEGINNING]}…"


def render_evaluation(title: str, summary: Summary, samples: Sequence[EvalSample]) -> str:
    """One self-contained page. Answers are untrusted: all text is escaped."""
    names = list(dict.fromkeys(score.environment for score in summary.scores))
    by_name = {name: [score for score in summary.scores if score.environment == name] for name in names}
    prompts = _prompts(samples)
    failures = [
        f"{score.subject} on {score.environment}: {score.failed} of {score.samples} samples have no score"
        + (f" ({'; '.join(score.reasons)})" if score.reasons else "")
        for score in summary.scores
        if score.failed
    ]
    return render_page(
        "evaluation.html.j2",
        title=title,
        summary=summary,
        environments=[(name, by_name[name]) for name in names],
        charts={name: build_chart(name, by_name[name]) for name in names},
        comparisons={name: [each for each in summary.comparisons if each.environment == name] for name in names},
        pairs={name: [each for each in summary.pairs if each.environment == name] for name in names},
        failures=failures,
        prompts=prompts[:MAX_PROMPTS],
        shown_prompts=min(MAX_PROMPTS, len(prompts)),
        all_prompts=len(prompts),
    )


def build_chart(title: str, scores: Sequence[Score]) -> Chart | None:
    """The mean over steps with its interval; None if fewer than two models are steps. The base is step 0."""
    found = [(_step(score.subject), score) for score in scores]
    steps = [(step, score) for step, score in found if step is not None]
    if len(steps) < 2:
        return None
    averages = [score.average for _, score in steps]
    band = ([each.low for each in averages], [each.high for each in averages])
    series = [plots.Series("mean reward, 95 % interval", [each.mean for each in averages], 0, band)]
    return Chart(title, plots.draw_lines(title, [step for step, _ in steps], series), series)


def _step(subject: str) -> int | None:
    if subject == "base":
        return 0
    found = re.fullmatch(r"step-(\d+)", subject)
    return int(found[1]) if found else None


def _prompts(samples: Sequence[EvalSample]) -> list[_ShownPrompt]:
    """Orders prompts by how much the models differ on them."""
    groups: dict[tuple[str, str], list[EvalSample]] = {}
    for sample in samples:
        groups.setdefault((sample.environment, sample.prompt_id), []).append(sample)

    def spread(group: Sequence[EvalSample]) -> float:
        means = []
        for subject in {each.subject for each in group}:
            rewards = [each.reward for each in group if each.subject == subject and each.reward is not None]
            means += [sum(rewards) / len(rewards)] if rewards else []
        return pvariance(means) if means else 0.0

    ordered = sorted(groups.items(), key=lambda item: (-spread(item[1]), item[0]))
    return [_shown(f"{environment}: {prompt}", group) for (environment, prompt), group in ordered]


def _shown(name: str, group: Sequence[EvalSample]) -> _ShownPrompt:
    first = sorted((each for each in group if each.sample_index == 0), key=lambda each: subject_order(each.subject))
    chosen = first or sorted(group, key=lambda each: subject_order(each.subject))[:1]
    given = [text for role, text in chosen[0].turns if role == "user"]
    return _ShownPrompt(
        name,
        given[0] if given else "",
        chosen[0].expected,
        [
            _ShownSample(
                each.subject, each.reward, each.outcome, each.failure, each.reasons,
                [*dropwhile(lambda turn: turn[0] != "assistant", each.turns)],
            )
            for each in chosen
        ],
    )  # fmt: skip
