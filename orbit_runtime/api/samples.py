"""A policy's answers, from a run folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orbit_runtime.data.records import decompress_rollouts
from orbit_runtime.errors import DataError
from orbit_runtime.storage import NotFound, Store
from orbit_runtime.types import Rollout

_KEY = re.compile(r"(rollouts/step-(\d+))\.jsonl\.zst")


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer, or one episode of several turns."""

    prompt_id: str
    index: int
    """Index among the samples of its prompt."""
    turns: Sequence[tuple[str, str]]
    """Role and text, in order."""
    reward: float | None
    """None if the outcome is `timeout` or `crash`."""
    outcome: str
    """`value`, `wrong`, `timeout` or `crash`."""
    parts: Mapping[str, float | None]
    """Name of a reward function → its value."""
    expected: Any
    """The expected answer, if the prompt's row has one."""
    finish_reason: str
    num_tokens: int
    """Number of tokens that the policy sampled."""

    @property
    def prompt(self) -> str:
        """Everything before the first answer."""
        spoken = [index for index, (role, _) in enumerate(self.turns) if role == "assistant"]
        return "\n".join(text for _, text in self.turns[: spoken[0] if spoken else None])

    @property
    def completion(self) -> str:
        """The last answer."""
        return next((text for role, text in reversed(self.turns) if role == "assistant"), "")


def sampled_steps(store: Store) -> dict[int, str]:
    """Steps whose samples are kept, in order → key of each without its extension."""
    found = [match for key in store.list("rollouts") if (match := _KEY.fullmatch(key))]
    return {int(each[2]): each[1] for each in sorted(found, key=lambda each: int(each[2]))}


def read_samples(store: Store, step: int | None) -> list[Sample]:
    """Args: step: None: the last step with samples."""
    kept = sampled_steps(store)
    if not kept:
        raise DataError("no samples are kept here", where=store.uri, fix="a run of demonstrations samples nothing")
    wanted = max(kept) if step is None else step
    if wanted not in kept:
        raise DataError(
            f"no samples are kept of step {wanted}", where=store.uri, fix=f"there are steps {min(kept)} to {max(kept)}"
        )
    key = kept[wanted]
    rollouts = decompress_rollouts(store.get(f"{key}.jsonl.zst"), where=f"{store.uri}/{key}.jsonl.zst")
    try:
        expected = json.loads(store.get(f"{key}.references.json"))
    except NotFound:
        expected = {}
    return [_build_sample(each, expected.get(each.prompt_id)) for each in rollouts]


def _build_sample(rollout: Rollout, expected: Any) -> Sample:
    return Sample(
        prompt_id=rollout.prompt_id,
        index=rollout.sample_index,
        turns=tuple((turn.role, turn.text) for turn in rollout.turns),
        reward=rollout.reward,
        outcome=rollout.outcome,
        parts=dict(rollout.reward_parts),
        expected=expected,
        finish_reason=rollout.finish_reason,
        num_tokens=sum(rollout.loss_mask_T),
    )
