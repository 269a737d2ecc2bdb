"""Builds the environment and the scorer that a manifest asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from orbit_runtime.environments.branching import Branching
from orbit_runtime.environments.episodes import Environment, EpisodeLimits, EpisodeSettings
from orbit_runtime.environments.targets import check_arguments, check_group_size, reward_targets
from orbit_runtime.environments.turns import MultiTurn, OwnProcess, SingleTurn, ToolUse
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.types import Sampling, Tokenizer
from orbit_runtime.workers.user_code.environment_pool import EnvironmentPool
from orbit_runtime.workers.user_code.reward_protocol import RewardScorer


def build_scorer(
    spec: RunSpec, functions: Mapping[str, Callable[..., Any]], search_path: Sequence[str]
) -> RewardScorer:
    """The scorer: worker processes, or threads of this process if functions (by reward name) were given from Python.

    Raises:
        ManifestError: see `check_arguments`.
    """
    check_arguments(spec, functions)
    targets = reward_targets(spec, functions)
    if functions:
        from orbit_runtime.workers.user_code.reward_pool import RewardThreads

        return RewardThreads(targets)
    from orbit_runtime.workers.user_code.reward_pool import RewardPool

    return RewardPool(targets, search_path=search_path)


def build_environment(
    run: str,
    spec: RunSpec,
    tokenizer: Tokenizer,
    scorer: RewardScorer,
    pool: EnvironmentPool | None,
    sampling: Sampling,
    *,
    only_first: bool = False,
) -> Environment:
    """Builds the environment of a run.

    Args:
        pool: processes for `targets.environment_target`; None if that is None.
        only_first: only an episode's first rollout counts, so a group has as many episodes as rollouts.

    Raises:
        ManifestError: the rollouts of an episode do not divide the group size.
    """
    weights = {reward.name: reward.weight for reward in spec.environment.rewards}
    if pool is None:
        return SingleTurn(run, tokenizer, scorer, weights, sampling, spec.algorithm.group_size, spec.data.seed)
    limits = spec.environment.limits
    settings = EpisodeSettings(
        run,
        sampling,
        EpisodeLimits(limits.turns, limits.tokens, spec.model.max_sequence_length, limits.seconds),
        spec.algorithm.group_size,
        spec.data.seed,
        spec.environment.gives_reward,
    )
    if pool.cohorts is not None:
        check_group_size(spec.algorithm.group_size, 1 if only_first else len(pool.cohorts))
        return Branching(
            settings, tokenizer, scorer, weights, pool.open_episode, pool.cohorts, only_first=only_first
        )  # fmt: skip
    opponent = partial(ToolUse, pool, tokenizer.call_format) if pool.tools else lambda: OwnProcess(pool.open_episode())
    return MultiTurn(settings, tokenizer, scorer, weights, opponent)
