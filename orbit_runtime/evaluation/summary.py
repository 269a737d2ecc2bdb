"""The results of an evaluation: scores of every model on every environment, and comparisons of models.

Belongs here: from samples to numbers, pure. Does not belong here: statistics (`scores`), showing them (`page`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from orbit_runtime.evaluation.records import EvalSample
from orbit_runtime.evaluation.scores import Estimate, PairedDifference, estimate, paired, pass_at_k, pass_ks

FAILED = ("timeout", "crash", "unanswered")
"""Outcomes without a score: counted, and part of no mean."""
MAX_PAIRED = 16
"""Most models of which all pairs are compared."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of a million tokens, in any currency."""

    prompt: float | None = None
    completion: float | None = None

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        if self.prompt is None and self.completion is None:
            return None
        return (prompt_tokens * (self.prompt or 0.0) + completion_tokens * (self.completion or 0.0)) / 1e6


@dataclass(frozen=True)
class Score:
    """One model on one environment."""

    subject: str
    environment: str
    average: Estimate
    """avg@k: the mean reward of a prompt's samples, over prompts."""
    passes: Mapping[int, Estimate]
    """pass@k by k, over the prompts that have k samples with a score."""
    outcomes: Mapping[str, int]
    failures: Mapping[str, int]
    """Number of unanswered samples by kind."""
    reasons: tuple[str, ...]
    """Why samples have no score: the first few reasons."""
    prompt_tokens: int
    completion_tokens: int
    retries: int
    cost: float | None
    means: Mapping[str, float]
    """Prompt id → mean reward of its samples."""
    truncated: int
    """Samples cut off by a token limit."""
    per_prompt: int
    """Samples of a prompt: the k of avg@k."""

    @property
    def samples(self) -> int:
        return sum(self.outcomes.values())

    @property
    def failed(self) -> int:
        return sum(self.outcomes.get(outcome, 0) for outcome in FAILED)

    def to_json(self) -> dict[str, Any]:
        facts = {name: value for name, value in asdict(self).items() if name not in ("passes", "means", "average")}
        return {
            **facts,
            "samples": self.samples,
            "failed": self.failed,
            "average": self.average.to_json(),
            "pass_at": {str(k): each.to_json() for k, each in self.passes.items()},
        }


@dataclass(frozen=True)
class Comparison:
    """`second` minus `first` on one environment, prompt by prompt."""

    environment: str
    first: str
    second: str
    paired: PairedDifference

    def to_json(self) -> dict[str, Any]:
        return {
            "environment": self.environment, "first": self.first, "second": self.second, **self.paired.to_json()
        }  # fmt: skip


@dataclass(frozen=True)
class Summary:
    """Everything that is reported about an evaluation."""

    scores: tuple[Score, ...]
    """Ordered by environment, then by model."""
    comparisons: tuple[Comparison, ...]
    """Each model compared with the first, or with the one that was named."""
    pairs: tuple[Comparison, ...]
    """All other pairs, the earlier model first; only the newest `MAX_PAIRED` models if there are more."""
    pass_at: float
    """A sample passes with at least this reward."""

    @property
    def failed_share(self) -> float:
        return sum(each.failed for each in self.scores) / max(1, sum(each.samples for each in self.scores))

    def to_json(self) -> dict[str, Any]:
        return {
            "pass_at": self.pass_at,
            "confidence": 0.95,
            "scores": [each.to_json() for each in self.scores],
            "comparisons": [each.to_json() for each in self.comparisons],
            "pairs": [each.to_json() for each in self.pairs],
        }


def build_summary(
    samples: Sequence[EvalSample], *, pass_at: float = 1.0, prices: Prices | None = None, against: str | None = None
) -> Summary:
    """
    Args:
        pass_at: smallest reward with which a sample passes.
        against: the model with which others are compared; if None, or absent for an environment, the first.
    """
    subjects = sorted({sample.subject for sample in samples}, key=subject_order)
    environments = sorted({sample.environment for sample in samples})
    scores: list[Score] = []
    comparisons: list[Comparison] = []
    pairs: list[Comparison] = []
    for environment in environments:
        of_environment = [
            build_score(
                [each for each in samples if (each.subject, each.environment) == (subject, environment)],
                pass_at,
                prices or Prices(),
            )
            for subject in subjects
            if any((each.subject, each.environment) == (subject, environment) for each in samples)
        ]
        scores += of_environment
        one = next((each for each in of_environment if each.subject == against), of_environment[0])
        others = [each for each in of_environment if each is not one]
        comparisons += [_compare(one, each) for each in others]
        pairs += [_compare(*pair) for pair in combinations(others[-MAX_PAIRED:], 2)]
    return Summary(tuple(scores), tuple(comparisons), tuple(pairs), pass_at)


def _compare(first: Score, second: Score) -> Comparison:
    return Comparison(first.environment, first.subject, second.subject, paired(first.means, second.means))


def build_score(samples: Sequence[EvalSample], pass_at: float, prices: Prices) -> Score:
    """The score of one model on one environment, from at least one sample."""
    rewards_P: dict[str, list[float]] = {}
    for sample in samples:
        if sample.reward is not None:
            rewards_P.setdefault(sample.prompt_id, []).append(sample.reward)
    means = {prompt: sum(rewards) / len(rewards) for prompt, rewards in rewards_P.items()}
    most = max(map(len, rewards_P.values()), default=1)
    passes = {
        k: estimate([
            pass_at_k(len(rewards), sum(each >= pass_at for each in rewards), k)
            for rewards in rewards_P.values()
            if len(rewards) >= k
        ])
        for k in pass_ks(most)
    }  # fmt: skip
    prompt_tokens = sum(sample.usage.prompt_tokens for sample in samples)
    completion_tokens = sum(sample.usage.completion_tokens for sample in samples)
    reasons = [reason for each in samples for reason in each.reasons]
    reasons += [each.failure.reason for each in samples if each.failure]
    return Score(
        subject=samples[0].subject,
        environment=samples[0].environment,
        average=estimate(list(means.values())),
        passes=passes,
        outcomes=dict(Counter(sample.outcome for sample in samples)),
        failures=dict(Counter(sample.failure.kind for sample in samples if sample.failure)),
        reasons=tuple(dict.fromkeys(reasons))[:3],
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        retries=sum(sample.usage.retries for sample in samples),
        cost=prices.cost(prompt_tokens, completion_tokens),
        means=means,
        per_prompt=most,
        truncated=sum(sample.finish_reason == "length" for sample in samples),
    )


def subject_order(name: str) -> tuple[int, int, str]:
    """The base first, then steps by number, then other models."""
    step = re.fullmatch(r"step-(\d+)", name)
    if step:
        return (1, int(step[1]), name)
    return (0 if name == "base" else 2, 0, name)
