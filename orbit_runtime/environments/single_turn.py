"""One prompt, one completion, scored.

Belongs here: from prompts to episodes, and from completions and scores to rollouts.
Does not belong here: sampling (`rollout`), running reward code (`workers`), when a step begins or ends (`loop`).

Legend: `_P` prompts, `_G` the rollouts of one prompt, `_T` tokens.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orbit_runtime.seeds import stream_key
from orbit_runtime.types import (
    FLAGS,
    FLOATS,
    TOKENS,
    Completion,
    Group,
    Outcome,
    Prompt,
    Rollout,
    Sampling,
    Tokenizer,
    TokenSource,
    Turn,
)
from orbit_runtime.workers.reward_protocol import RewardCall, RewardResult, RewardScorer

FAILED: tuple[Outcome, ...] = ("timeout", "crash")
SUBMIT_CALLS, SUBMIT_SECONDS = 128, 0.05
"""Reward calls travel together: so many, or those of so long, whichever is first."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One rollout to be played."""

    number: int
    """From 0, in the prompts' order."""
    prompt: Prompt
    sample_index: int
    prompt_ids_T: tuple[int, ...]


class SingleTurn:
    """Plays a step's episodes, has completions scored as they arrive, and returns groups in the prompts' order.

    One step at a time: `build_episodes`, then `play` for each, in any order or all at once, then `build_groups`, or
    `discard` at the end.
    """

    def __init__(
        self,
        run: str,
        tokenizer: Tokenizer,
        scorer: RewardScorer,
        weights: Mapping[str, float],
        sampling: Sampling,
        group_size: int,
        seed: int,
    ) -> None:
        self._run = run
        self._tokenizer = tokenizer
        self._scorer = scorer
        self._weights = dict(weights)
        """Reward name → its factor in the sum, in the manifest's order."""
        self._sampling = sampling
        self._group_size = group_size
        self._seed = seed
        self._episodes: list[Episode] = []
        self._completions: dict[int, Completion] = {}
        self._submitted: list[int] = []
        self._waiting: list[RewardCall] = []
        self._flushed = 0.0

    def build_episodes(self, prompts_P: Sequence[Prompt]) -> list[Episode]:
        """`group_size` episodes per prompt."""
        self._episodes, self._completions, self._submitted = [], {}, []
        encoded = self._tokenizer.encode_many([prompt.messages for prompt in prompts_P])
        for prompt, prompt_ids in zip(prompts_P, encoded, strict=True):
            ids = tuple(prompt_ids)
            for sample in range(self._group_size):
                self._episodes.append(Episode(len(self._episodes), prompt, sample, ids))
        return [*self._episodes]

    async def play(self, episode: Episode, tokens: TokenSource) -> None:
        """Asks for the episode's completion and starts scoring it, together with those that end about the same time."""
        prompt = episode.prompt
        key = stream_key(self._seed, "sample", prompt.prompt_id, prompt.visit, episode.sample_index, 0)
        completion = await tokens.sample(episode.prompt_ids_T, self._sampling, key=key)
        self._completions[episode.number] = completion
        self._submitted.append(episode.number)
        self._waiting += [RewardCall(name, completion.text, prompt.messages, prompt.fields) for name in self._weights]
        if len(self._waiting) >= SUBMIT_CALLS or time.monotonic() - self._flushed > SUBMIT_SECONDS:
            self._flush()

    def discard(self) -> None:
        """Drops the step of a run that stops: rewards still running are ended, however long they were allowed."""
        self._scorer.close()
        self._episodes, self._completions, self._submitted, self._waiting = [], {}, [], []

    def is_scored(self, wait_seconds: float) -> bool:
        """Whether `build_groups` would return at once, after waiting so long for it."""
        self._flush()
        return self._scorer.wait(wait_seconds)

    def build_groups(self, step: int) -> tuple[list[Group], list[str]]:
        """Waits for the scores; returns groups, and the reasons of rewards that timed out or crashed."""
        self._flush()
        results = self._scorer.gather()
        width = len(self._weights)
        by_episode = {
            number: results[index * width : (index + 1) * width] for index, number in enumerate(self._submitted)
        }
        rollouts = [
            self._rollout(step, episode, self._completions[episode.number], by_episode[episode.number])
            for episode in self._episodes
        ]
        size = self._group_size
        groups = [
            Group(self._episodes[start].prompt, tuple(rollouts[start : start + size]))
            for start in range(0, len(rollouts), size)
        ]
        reasons = [result.reason for result in results if result.outcome in FAILED]
        if not reasons and any(rollout.outcome in FAILED for rollout in rollouts):
            reasons = ["the weighted sum of the rewards is not finite"]
        return groups, list(dict.fromkeys(reasons))

    def _flush(self) -> None:
        self._scorer.submit(self._waiting)
        self._waiting, self._flushed = [], time.monotonic()

    def _rollout(self, step: int, episode: Episode, completion: Completion, results: Sequence[RewardResult]) -> Rollout:
        prompt_T, answer_T = episode.prompt_ids_T, completion.token_ids_T
        blank = len(prompt_T)
        total = blank + len(answer_T)
        reward, outcome = combine(results, list(self._weights.values()))
        question = str(episode.prompt.messages[-1].get("content", ""))
        return Rollout(
            run=self._run,
            step=step,
            prompt_id=episode.prompt.prompt_id,
            sample_index=episode.sample_index,
            turns=(Turn("user", 0, blank, question), Turn("assistant", blank, total, completion.text)),
            token_ids_T=array(TOKENS, prompt_T) + answer_T,
            loss_mask_T=array(FLAGS, bytes(blank) + b"\1" * len(answer_T)),
            logprobs_T=array(FLOATS, (0.0,)) * blank + completion.logprobs_T,
            versions_T=array(TOKENS, (-1,)) * blank + completion.versions_T,
            reward=reward,
            outcome=outcome,
            reward_parts={name: result.value for name, result in zip(self._weights, results, strict=True)},
            finish_reason=completion.finish_reason,
            routed_experts=completion.routed_experts,
        )


def combine(results: Sequence[RewardResult], weights: Sequence[float]) -> tuple[float | None, Outcome]:
    """Weighted sum of a rollout's rewards. One failed part fails it; one wrong part makes it wrong, and it trains.

    A sum that overflows is a crash, as an infinite reward is.

    Example: values 1.0 and 0.5 with weights 1.0 and 0.2 give `(1.1, "value")`.
    """
    outcomes = [result.outcome for result in results]
    for failed in FAILED:
        if failed in outcomes:
            return None, failed
    total = sum(weight * (result.value or 0.0) for result, weight in zip(results, weights, strict=True))
    if not math.isfinite(total):
        return None, "crash"
    return total, "wrong" if "wrong" in outcomes else "value"
