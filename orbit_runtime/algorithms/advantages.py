"""Advantages from the rewards of a step.

Belongs here: baselines and normalisation, in plain floats; the two are independent and combine freely. Penalties that
are subtracted from a reward before it is compared with others: a completion's length, KL from the reference. Does not
belong here: KL in the loss (`distillation`), which has a gradient; losses.

Legend: `_P` prompts, `_G` the rollouts of one prompt, `_T` the trained tokens of one rollout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from orbit_runtime.algorithms.constants import LOG_RATIO_LIMIT
from orbit_runtime.errors import DivergedError
from orbit_runtime.spec.objectives import Baseline, KLEstimator, Normalize


def overlong_penalty(length: int, *, longest: int, buffer_share: float, penalty: float) -> float:
    """Penalty of a completion of `length` tokens, from 0.0 to `penalty` (DAPO, arXiv:2503.14476 eq. 13).

    Zero up to `(1 - buffer_share) * longest` tokens, the full penalty at `longest`, and linear in between.

    Example: `overlong_penalty(95, longest=100, buffer_share=0.2, penalty=1.0) == 0.75`
    """
    buffer = buffer_share * longest
    return penalty * min(1.0, max(0.0, (length - (longest - buffer)) / buffer))


_ESTIMATORS: Mapping[str, Callable[[float], float]] = {
    "K1": lambda d: -d,
    "K2": lambda d: d * d / 2,
    "K3": lambda d: math.expm1(d) - d,
}


def kl_penalties(
    logprobs_T: Sequence[float], reference_logprobs_T: Sequence[float], *, coefficient: float, estimator: KLEstimator
) -> list[float]:
    """coefficient * KL_t of each trained token of a rollout, to be subtracted from its reward (arXiv:2203.02155 eq. 2).

    With d = log(reference) - log(policy), under the policy that sampled: K1 is -d, K2 d²/2, K3 e^d - 1 - d
    (`distillation.kl_estimate`). A penalty has no gradient of its own, so only the value matters, and K1 estimates it
    without bias: https://arxiv.org/abs/2506.09477.

    Example: `kl_penalties([-1.0], [-1.5], coefficient=0.1, estimator="K1") == [0.05]`
    """
    term = _ESTIMATORS[estimator]
    return [
        coefficient * term(max(-LOG_RATIO_LIMIT, min(LOG_RATIO_LIMIT, reference - policy)))
        for policy, reference in zip(logprobs_T, reference_logprobs_T, strict=True)
    ]


STD_EPSILON = 1e-4
"""Added to a group's standard deviation, as in TRL 1.16 (`GRPOTrainer`, `scale_rewards="group"`)."""
VARIANCE_EPSILON = 1e-8
"""Added to the variance of a batch, as in verl 0.9 (`masked_whiten`)."""
REWARD_LIMIT = 3.4028234663852886e38
"""The largest fp32 number: advantages are trained on in fp32."""

Advantage = float | Sequence[float]
"""Advantage of a rollout: one number for all its trained tokens, or one per token."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The rollouts of one prompt, as advantages need them.

    Example: `ScoredGroup([1.0, 0.0, None], [12, 7, 9])`
    """

    rewards_G: Sequence[float | None]
    """Shaped, without the KL penalty. `None` if the reward timed out or crashed."""
    lengths_G: Sequence[int]
    """Number of trained tokens."""
    penalties_GT: Sequence[Sequence[float]] | None = None
    """KL penalty of each trained token, subtracted from the reward; None for no penalty."""
    values_GT: Sequence[Sequence[float]] | None = None
    """The critic's value before each trained token; for a bootstrapped truncated completion, one more number: the value
    after the last token. None without a critic."""

    @property
    def totals_G(self) -> list[float | None]:
        """Rewards minus the penalties of their tokens."""
        if self.penalties_GT is None:
            return list(self.rewards_G)
        return [
            None if reward is None else reward - math.fsum(penalties_T)
            for reward, penalties_T in zip(self.rewards_G, self.penalties_GT, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class GAE:
    """Generalised advantage estimation: how far ahead an advantage looks."""

    gamma: float
    gae_lambda: float


AdvantageFunction = Callable[[Sequence[ScoredGroup]], Sequence[Sequence[Advantage]]]
"""All groups of a step → an advantage for each rollout of each group, 0.0 for a rollout without a reward."""


def estimate_advantages(
    groups_P: Sequence[ScoredGroup], *, baseline: Baseline, normalize: Normalize, gae: GAE | None = None
) -> list[list[Advantage]]:
    """An advantage for each rollout of each group of a step: its reward against a baseline, then normalised.

    ```
    GroupMean       A_i = r_i - mean(r)                         GRPO, arXiv:2402.03300 section 4.1.2
    LeaveOneOut     A_i = r_i - mean(r without r_i)             RLOO, arXiv:2402.14740
    LengthWeighted  A_i = r_i - sum(L_j r_j) / sum(L_j)         OPO, arXiv:2505.23585
    Critic          A_it by GAE against a critic's values       PPO (`critic_advantages`)
    None            A_it = r_i - what token t and those after it pay      REINFORCE++, arXiv:2501.03262

    Group           A_i / (std(r) + 1e-4), unbiased             GRPO; TRL 1.16
    Batch           (A - mean) / sqrt(var + 1e-8), over the trained tokens of the step      REINFORCE++; verl 0.9
    None            as it is                                    Dr. GRPO, arXiv:2503.20783
    ```

    A reward of `None` (timeout or crash) is no observation: it is left out of every mean and deviation and gets
    advantage 0.0. With fewer than two rewards in a group, or with equal rewards, nothing remains after the baseline:
    every advantage is exactly 0.0 before `Batch`.

    Raises:
        DivergedError: a reward, after weights and penalties, is not a finite fp32 number.

    Example: `estimate_advantages([ScoredGroup([1.0, 0.0, None], [3, 3, 3])], baseline="GroupMean", normalize="None")
    == [[0.5, -0.5, 0.0]]`
    """
    if baseline == "Critic":
        assert gae is not None, "a critic comes with its discount"
        advantages_PG = [critic_advantages(group, gae) for group in groups_P]
    elif baseline == "None":
        advantages_PG = [_returns(group) for group in groups_P]
    else:
        advantages_PG = [
            list(compared(group.totals_G, group.lengths_G, baseline, by_deviation=normalize == "Group"))
            for group in groups_P
        ]
    return _whitened(groups_P, advantages_PG) if normalize == "Batch" else advantages_PG


def compared(
    rewards_G: Sequence[float | None], lengths_G: Sequence[int], baseline: Baseline, *, by_deviation: bool
) -> list[float]:
    """One group against its own baseline."""
    check_rewards(rewards_G)
    if not is_informative(rewards_G):
        return [0.0] * len(rewards_G)
    valid = [reward for reward in rewards_G if reward is not None]
    mean = math.fsum(valid) / len(valid)
    scale = 1.0
    if by_deviation:
        variance = math.fsum((reward - mean) ** 2 for reward in valid) / (len(valid) - 1)
        scale = math.sqrt(variance) + STD_EPSILON
    known = [(reward, length) for reward, length in zip(rewards_G, lengths_G, strict=True) if reward is not None]
    against = _BASELINES[baseline](known, mean)
    return [0.0 if reward is None else (reward - against(reward)) / scale for reward in rewards_G]


_Known = Sequence[tuple[float, int]]


def _group_mean(known: _Known, mean: float) -> Callable[[float], float]:
    return lambda reward: mean


def _leave_one_out(known: _Known, mean: float) -> Callable[[float], float]:
    count = len(known)
    return lambda reward: (count * mean - reward) / (count - 1)


def _length_weighted(known: _Known, mean: float) -> Callable[[float], float]:
    tokens = sum(length for _, length in known)
    weighted = math.fsum(length * reward for reward, length in known) / tokens if tokens else mean
    return lambda reward: weighted


_BASELINES: Mapping[str, Callable[[_Known, float], Callable[[float], float]]] = {
    "GroupMean": _group_mean,
    "LeaveOneOut": _leave_one_out,
    "LengthWeighted": _length_weighted,
}


def _returns(group: ScoredGroup) -> list[Advantage]:
    """Reward to go of each token: the rollout's reward arrives with its last token, a penalty with each token."""
    check_rewards(group.totals_G)
    if group.penalties_GT is None:
        return [0.0 if reward is None else reward for reward in group.rewards_G]
    return [
        0.0 if reward is None else [reward - ahead for ahead in [*accumulate(reversed(penalties_T))][::-1]]
        for reward, penalties_T in zip(group.rewards_G, group.penalties_GT, strict=True)
    ]


def critic_advantages(group: ScoredGroup, gae: GAE) -> list[Advantage]:
    """Generalised advantage estimation (arXiv:1506.02438 eq. 16), for each trained token of each rollout.

    ```
    delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lambda A_{t+1}
    ```
    Only tokens sampled by the policy are time steps: text that a tool or a user inserted between two of them belongs to
    the next state. The reward arrives with the last token, a penalty with each. The value after the last token is 0,
    unless `values_GT` provides one.

    Example: `critic_advantages(ScoredGroup([1.0], [2], values_GT=[[0.5, 0.25]]), GAE(1.0, 1.0)) == [[0.5, 0.75]]`
    """
    check_rewards(group.totals_G)
    assert group.values_GT is not None, "a critic's values are scored before"
    none_GT = [[0.0] * length for length in group.lengths_G]
    return [
        0.0 if reward is None else _gae(reward, penalties_T, values_T, gae)
        for reward, penalties_T, values_T in zip(
            group.rewards_G, group.penalties_GT or none_GT, group.values_GT, strict=True
        )
    ]


def _gae(reward: float, penalties_T: Sequence[float], values_T: Sequence[float], gae: GAE) -> list[float]:
    length = len(penalties_T)
    following = values_T[length] if len(values_T) > length else 0.0
    ahead, found = 0.0, []
    for step in range(length - 1, -1, -1):
        earned = (reward if step == length - 1 else 0.0) - penalties_T[step]
        ahead = earned + gae.gamma * following - values_T[step] + gae.gamma * gae.gae_lambda * ahead
        following = values_T[step]
        found.append(ahead)
    return found[::-1]


def critic_returns(groups_P: Sequence[ScoredGroup], gae: GAE) -> list[list[Advantage]]:
    """The critic's target before each trained token: its unnormalised advantage plus its value there."""
    return [
        [
            [advantage + value for advantage, value in zip(advantages_T, values_T, strict=False)]
            if isinstance(advantages_T, Sequence)
            else advantages_T
            for advantages_T, values_T in zip(critic_advantages(group, gae), group.values_GT or (), strict=True)
        ]
        for group in groups_P
    ]


def _whitened(groups_P: Sequence[ScoredGroup], advantages_PG: list[list[Advantage]]) -> list[list[Advantage]]:
    """Mean 0 and deviation 1 over all trained tokens of rollouts with a reward; exactly 0.0 if all are equal."""
    values: list[tuple[float, int]] = []
    for group, advantages_G in zip(groups_P, advantages_PG, strict=True):
        for reward, length, advantage in zip(group.rewards_G, group.lengths_G, advantages_G, strict=True):
            if reward is not None and length:
                values += (
                    [(each, 1) for each in advantage] if isinstance(advantage, Sequence) else [(advantage, length)]
                )
    tokens = sum(count for _, count in values)
    if tokens < 2 or len({value for value, _ in values}) < 2:
        return [[0.0] * len(advantages_G) for advantages_G in advantages_PG]
    mean = math.fsum(value * count for value, count in values) / tokens
    variance = math.fsum(count * (value - mean) ** 2 for value, count in values) / (tokens - 1)
    scale = math.sqrt(variance + VARIANCE_EPSILON)

    def whitened(reward: float | None, advantage: Advantage) -> Advantage:
        if reward is None:
            return 0.0
        if isinstance(advantage, Sequence):
            return [(each - mean) / scale for each in advantage]
        return (advantage - mean) / scale

    return [
        [whitened(*each) for each in zip(group.rewards_G, advantages_G, strict=True)]
        for group, advantages_G in zip(groups_P, advantages_PG, strict=True)
    ]


def is_informative(rewards_G: Sequence[float | None]) -> bool:
    """Whether at least two rollouts of a group have different rewards; otherwise the group gives no signal."""
    return len({reward for reward in rewards_G if reward is not None}) > 1


def check_rewards(rewards_G: Sequence[float | None]) -> None:
    """Raises DivergedError if a reward is not a finite fp32 number."""
    for reward in rewards_G:
        if reward is not None and not abs(reward) <= REWARD_LIMIT:  # NaN compares false
            raise DivergedError(
                f"a reward of {reward:.3g} is beyond what fp32 can hold",
                where="spec.environment.rewards",
                fix="scale the reward or its weight so that values are of the order of 1; the rollouts are kept in "
                "failures/",
            )
