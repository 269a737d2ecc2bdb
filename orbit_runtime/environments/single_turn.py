"""One prompt, one completion, scored.

Belongs here: from prompts to episodes, and from completions and scores to rollouts. Does not belong here: sampling
(`rollout`), running reward code (`workers`), which step an episode belongs to (`loop`).

Legend: `_P` prompts, `_T` tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orbit_runtime.environments.episodes import Episode, Played, Track, build_played
from orbit_runtime.environments.scoring import Scoring
from orbit_runtime.environments.trajectory import Trajectory
from orbit_runtime.seeds import stream_key
from orbit_runtime.types import Prompt, Sampling, Tokenizer, TokenSource
from orbit_runtime.workers.user_code.reward_protocol import RewardCall, RewardScorer


class SingleTurn:
    """Builds episodes from prompts and plays them, any number at a time, in one event loop."""

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
        """Samples the episode's completion and has it scored."""
        prompt = episode.prompt
        key = stream_key(self._seed, "sample", prompt.prompt_id, prompt.visit, episode.sample_index, 0)
        completion = await tokens.sample(episode.prompt_ids_T, self._sampling, key=key)
        results = await self._scoring.score(
            [RewardCall(name, completion.text, prompt.messages, prompt.fields) for name in self._weights]
        )
        track = Trajectory()
        track.add_given("user", str(prompt.messages[-1].get("content", "")), episode.prompt_ids_T)
        track.add_answer(completion)
        return build_played(self._run, episode, [Track(track, results)], self._weights)
