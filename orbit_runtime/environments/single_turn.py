"""One prompt, one completion, scored.

Belongs here: from prompts to episodes, and from completions and scores to rollouts.
Does not belong here: sampling (`rollout`), running reward code (`workers`), which step an episode is of (`loop`).

Legend: `_P` prompts, `_T` tokens.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orbit_runtime.environments.scoring import Scoring
from orbit_runtime.seeds import stream_key
from orbit_runtime.types import (
    FLAGS,
    FLOATS,
    TOKENS,
    Completion,
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


@dataclass(frozen=True, slots=True)
class Episode:
    """One rollout to be played."""

    step: int
    """That its rollout trains in."""
    prompt: Prompt
    sample_index: int
    prompt_ids_T: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Played:
    """A rollout that has ended and is scored."""

    rollout: Rollout
    reasons: tuple[str, ...] = ()
    """Of rewards that timed out or crashed."""


class SingleTurn:
    """Builds episodes of prompts, and plays each: any number of them at the same time, in one event loop."""

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
        self._scoring = Scoring(scorer)
        self._weights = dict(weights)
        """Reward name → its factor in the sum, in the manifest's order."""
        self._sampling = sampling
        self._group_size = group_size
        self._seed = seed

    def build_episodes(self, prompts_P: Sequence[Prompt], step: int) -> list[Episode]:
        """`group_size` episodes per prompt, in the prompts' order."""
        encoded = self._tokenizer.encode_many([prompt.messages for prompt in prompts_P])
        return [
            Episode(step, prompt, sample, tuple(prompt_ids))
            for prompt, prompt_ids in zip(prompts_P, encoded, strict=True)
            for sample in range(self._group_size)
        ]

    async def play(self, episode: Episode, tokens: TokenSource) -> Played:
        """Asks for the episode's completion and has it scored."""
        prompt = episode.prompt
        key = stream_key(self._seed, "sample", prompt.prompt_id, prompt.visit, episode.sample_index, 0)
        completion = await tokens.sample(episode.prompt_ids_T, self._sampling, key=key)
        results = await self._scoring.score(
            [RewardCall(name, completion.text, prompt.messages, prompt.fields) for name in self._weights]
        )
        rollout = self._rollout(episode, completion, results)
        reasons = tuple(result.reason for result in results if result.outcome in FAILED)
        if rollout.outcome in FAILED and not reasons:
            reasons = ("the weighted sum of the rewards is not finite",)
        return Played(rollout, reasons)

    def _rollout(self, episode: Episode, completion: Completion, results: Sequence[RewardResult]) -> Rollout:
        prompt_T, answer_T = episode.prompt_ids_T, completion.token_ids_T
        blank = len(prompt_T)
        total = blank + len(answer_T)
        reward, outcome = combine(results, list(self._weights.values()))
        question = str(episode.prompt.messages[-1].get("content", ""))
        return Rollout(
            run=self._run,
            step=episode.step,
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
