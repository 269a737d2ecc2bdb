"""`spec.algorithm`: from scored rollouts to a loss.

Belongs here: the settings of the loss. Does not belong here: the loss (`algorithms`) or the optimiser (`training`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from orbit_runtime.spec.block import IDENTITY, Block, Contradiction

TRUNCATION_CAP = 2.0


class KL(Block):
    """Divergence from the reference policy, which is the same model with the adapter off."""

    coefficient: Annotated[float, IDENTITY, Field(ge=0, le=1000)] = 0.0
    """Weight of the divergence; 0 switches it off."""
    placement: Annotated[Literal["Loss", "Reward"], IDENTITY] = "Loss"
    """Added to the loss, or subtracted from the reward before the advantage."""
    estimator: Annotated[Literal["K1", "K2", "K3"], IDENTITY] = "K3"
    """Per-token estimator of the divergence (J. Schulman, Approximating KL divergence, 2020)."""


class Clip(Block):
    """The ratio of new to old probability is clipped to `[1 - low, 1 + high]`."""

    low: Annotated[float, IDENTITY, Field(ge=0, lt=1)] = 0.2
    """How far below 1 the ratio counts."""
    high: Annotated[float, IDENTITY, Field(ge=0, le=100)] = 0.2
    """How far above 1 the ratio counts."""

    def contradictions(self) -> Iterator[Contradiction]:
        if self.low > self.high:
            yield Contradiction(
                ("low",),
                (("high",),),
                f"{self.low:g} is above `high` ({self.high:g}): good samples would be clipped before bad ones",
                f"write `low: {self.high:g}` or less, or raise `high`",
            )


class Advantage(Block):
    """How rewards of a group become advantages."""

    normalize: Annotated[Literal["Group", "None"], IDENTITY] = "Group"
    """Divide by the standard deviation of the group, or only subtract its mean."""


class ImportanceSampling(Block):
    """Correction for the difference between the trainer's and the engine's log-probs."""

    type: Annotated[Literal["None", "TokenTruncated"], IDENTITY] = "None"
    """No correction, or each token weighted by `min(trainer / engine, cap)`."""
    cap: Annotated[float, IDENTITY, Field(gt=0, le=1000)] = TRUNCATION_CAP
    """Largest weight of a token under `TokenTruncated`."""

    def contradictions(self) -> Iterator[Contradiction]:
        if self.type == "None" and self.cap != TRUNCATION_CAP:
            yield Contradiction(
                ("cap",),
                (("type",),),
                "nothing is weighted while `type` is `None`, so this field does nothing",
                "remove `cap`, or write `type: TokenTruncated`",
            )


class Algorithm(Block):
    """The learning rule."""

    type: Annotated[Literal["GRPO"], IDENTITY] = "GRPO"
    """`GRPO`: a reward counts against the mean of its group, https://arxiv.org/abs/2402.03300."""
    group_size: Annotated[int, IDENTITY, Field(ge=1, le=4096)] = 8
    """Rollouts per prompt. A group of one has no gradient."""
    kl: KL = KL()
    """Divergence from the base."""
    clip: Clip = Clip()
    """Limits of the probability ratio."""
    advantage: Advantage = Advantage()
    """From rewards to advantages."""
    reduction: Annotated[Literal["Token", "Sequence", "Constant"], IDENTITY] = "Token"
    """Mean over all tokens; mean over sequences of each one's mean; or sum over a constant length."""
    importance_sampling: ImportanceSampling = ImportanceSampling()
    """Trainer against engine."""
