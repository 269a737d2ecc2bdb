"""The result of one sample, and its line on disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
import zstandard

from orbit_runtime.data.records import decompressed_lines
from orbit_runtime.environments.episodes import FinishedEpisode
from orbit_runtime.errors import DataError
from orbit_runtime.types import Outcome

FailureKind = Literal["Unreachable", "Timeout", "RateLimited", "ServerError", "CutStream", "BadAnswer", "Refused"]
"""Why a model did not answer."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage of one sample."""

    prompt_tokens: int = 0
    """Prompt tokens of all its requests, as counted by the API or given to the engine."""
    completion_tokens: int = 0
    requests: int = 0
    retries: int = 0
    """Number of repeated requests."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A model did not answer after every retry."""

    kind: FailureKind
    reason: str


@dataclass(frozen=True, slots=True)
class EvalSample:
    """One episode of one prompt against one model."""

    subject: str
    """The model: `base`, `step-20`, or an API model's name."""
    environment: str
    prompt_id: str
    sample_index: int
    turns: tuple[tuple[str, str], ...]
    """Role and text."""
    reward: float | None
    """None without a score: a failure is never scored as 0."""
    outcome: Outcome | Literal["unanswered"]
    reward_parts: Mapping[str, float | None] = field(default_factory=dict)
    finish_reason: str = ""
    usage: Usage = Usage()
    seconds: float = 0.0
    failure: Failure | None = None
    """The failure, if the outcome is `unanswered`."""
    reasons: tuple[str, ...] = ()
    """Why rewards or the environment failed."""
    expected: str = ""
    """The expected answer from the prompt's row, for display."""

    @property
    def key(self) -> tuple[str, str, str, int]:
        return (self.subject, self.environment, self.prompt_id, self.sample_index)


def build_sample(subject: str, environment: str, played: FinishedEpisode, usage: Usage, seconds: float) -> EvalSample:
    """The record of an episode that was played to its end."""
    rollout = played.rollout
    return EvalSample(
        subject=subject,
        environment=environment,
        prompt_id=rollout.prompt_id,
        sample_index=rollout.sample_index,
        turns=tuple((turn.role, turn.text) for turn in rollout.turns),
        reward=rollout.reward,
        outcome=rollout.outcome,
        reward_parts=rollout.reward_parts,
        finish_reason=rollout.finish_reason,
        usage=usage,
        seconds=seconds,
        reasons=played.reasons,
    )


def compress_samples(samples: Iterable[EvalSample]) -> bytes:
    lines = b"".join(orjson.dumps(sample, option=orjson.OPT_APPEND_NEWLINE) for sample in samples)
    return zstandard.ZstdCompressor(level=3).compress(lines)


def decompress_samples(data: bytes, *, where: str) -> list[EvalSample]:
    """Raises DataError if the bytes are not such a file."""
    try:
        return [_from_row(orjson.loads(line)) for line in decompressed_lines(data)]
    except (zstandard.ZstdError, orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        fix = "remove that file: its samples are requested again"
        raise DataError(f"not a file of samples: {error}", where=where, fix=fix) from error


def _from_row(row: dict[str, Any]) -> EvalSample:
    failure = row.pop("failure")
    return EvalSample(
        **{
            **row,
            "turns": tuple((role, text) for role, text in row["turns"]),
            "usage": Usage(**row["usage"]),
            "failure": Failure(**failure) if failure else None,
            "reasons": tuple(row["reasons"]),
        }
    )
