"""`spec.algorithm`: from scored rollouts to a loss.

Belongs here: the settings of advantages and loss. Does not belong here: what each type is made of (`objectives`), the
arithmetic (`algorithms`), the optimiser (`training`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from orbit_runtime.spec.block import IDENTITY, LATER_IDENTITY, Block, Entrypoint, Rule, by_type, later_identity
from orbit_runtime.spec.objectives import (
    CORRECTIONS,
    OBJECTIVES,
    AlgorithmType,
    Baseline,
    CorrectionType,
    KLEstimator,
    KLPlacement,
    Normalize,
    Objective,
    Reduction,
)
from orbit_runtime.spec.teacher import Teacher

TRUNCATION_CAP = CORRECTIONS["None"].cap
BUFFER_SHARE = 0.2
UNREWARDED = ("Distillation", "SFT")
IDLE_WITHOUT_REWARD = (
    ("clip", "high"),
    ("advantage", "baseline"),
    ("advantage", "normalize"),
    ("overlong", "penalty"),
)
"""Fields that only losses with rewards read: no loss from a teacher or demonstrations alone does."""


def _decided(path: str, attribute: str, block: str = "self") -> str:
    """CEL of a field that the type decides where it is left out."""
    return by_type(path, {name: getattr(row, attribute) for name, row in OBJECTIVES.items()}, block)


def max_rounds(block: str) -> str:
    """CEL of `dynamicSampling.maxRounds`. Args: block: CEL of the algorithm's block."""
    return _decided("dynamicSampling.maxRounds", "max_rounds", block)


_UNBOUNDED = [name for name, row in OBJECTIVES.items() if row.clip_low is None]
_LOW, _HIGH = _decided("clip.low", "clip_low"), _decided("clip.high", "clip_high")
_BASELINE, _NORMALIZE = (_decided(f"advantage.{name}", name) for name in ("baseline", "normalize"))
_PLACEMENT, _ESTIMATOR = (_decided(f"kl.{name}", f"kl_{name}") for name in ("placement", "estimator"))
_PENALTY = _decided("overlong.penalty", "overlong_penalty")
_CAP, _FLOOR = (
    by_type(name, {each: getattr(row, name) for each, row in CORRECTIONS.items()}) for name in ("cap", "floor")
)


class KL(Block):
    """Divergence from the reference policy, which is the same model with the adapter off."""

    coefficient: Annotated[float, IDENTITY, Field(ge=0, le=1000)] = 0.0
    """Weight of the divergence; 0 switches it off."""
    placement: Annotated[KLPlacement | None, IDENTITY] = None
    """Whether it is added to the loss, or subtracted from the reward before the advantage. If unset, the default of
    `type`."""
    estimator: Annotated[KLEstimator | None, IDENTITY] = None
    """Per-token estimator of the divergence (J. Schulman, Approximating KL divergence, 2020). If unset, the default of
    `type`. In the loss, the gradient of `K1` alone is zero on average: https://arxiv.org/abs/2506.09477."""
    importance_weighted: Annotated[bool, LATER_IDENTITY] = False
    """In the loss, multiply each term by the token's ratio of new to old probability, so that `K1` and `K3` have the
    gradient of KL(policy || reference): DeepSeek-V3.2, https://arxiv.org/abs/2512.02556."""


class Clip(Block):
    """The ratio of new to old probability is clipped to `[1 - low, 1 + high]`."""

    low: Annotated[float | None, IDENTITY, Field(ge=0, lt=1)] = None
    """Distance from 1 to the lower bound of the ratio. If unset, the default of `type`."""
    high: Annotated[float | None, IDENTITY, Field(ge=0, le=100)] = None
    """Distance from 1 to the upper bound of the ratio. If unset, the default of `type`."""


class Advantage(Block):
    """How rewards become advantages."""

    baseline: Annotated[Baseline | None, later_identity("GroupMean")] = None
    """What a reward is compared with: the mean of its group, the mean of the others in the group, the group's mean
    weighted by length, a critic's values (GAE), or nothing. If unset, the default of `type`."""
    normalize: Annotated[Normalize | None, IDENTITY] = None
    """Divide by the standard deviation of the group; or subtract the mean over all tokens of the step and divide by
    their standard deviation; or neither. If unset, the default of `type`."""
    entrypoint: Annotated[Entrypoint | None, LATER_IDENTITY, Field(examples=["my_objective:advantages"])] = None
    """A function of yours, `module:function`, that replaces `baseline` and `normalize`."""


class ImportanceSampling(Block):
    """Correction for the difference between the trainer's and the engine's log-probs."""

    type: Annotated[CorrectionType, IDENTITY] = "None"
    """`None`: no correction. Otherwise each token is weighted by the ratio `trainer / engine` of the token or of its
    whole sequence, either as `min(ratio, cap)` or as 0 outside `[floor, cap]`. `GeometricMasked` keeps or drops a whole
    sequence, by the geometric mean of its tokens' ratios."""
    cap: Annotated[float | None, IDENTITY, Field(gt=0, le=1000)] = None
    """Largest weight, or largest ratio that is kept. If unset, the default of `type`."""
    floor: Annotated[float | None, LATER_IDENTITY, Field(gt=0, le=1000)] = None
    """Smallest ratio that is kept with the masked types. If unset, the default of `type`."""
    veto: Annotated[float | None, LATER_IDENTITY, Field(gt=0, le=1)] = None
    """A sequence is dropped as a whole if the ratio of any token is below this; if unset, none is."""

    @property
    def bounds(self) -> tuple[float, float | None]:
        """Cap and floor, from the manifest or the type."""
        usual = CORRECTIONS[self.type]
        return (usual.cap if self.cap is None else self.cap), (usual.floor if self.floor is None else self.floor)

    rules = (
        *(
            Rule(
                name,
                f"self.type != 'None' || {idle}",
                "nothing is weighted while `type` is `None`, so this field does nothing",
                f"remove `{name}`, or write `type: {kind}`",
            )
            for name, idle, kind in (
                ("cap", f"!has(self.cap) || self.cap == {TRUNCATION_CAP}", "TokenTruncated"),
                ("floor", "!has(self.floor)", "TokenMasked"),
                ("veto", "!has(self.veto)", "TokenTruncated"),
            )
        ),
        Rule(
            "floor",
            "!self.type.endsWith('Truncated') || !has(self.floor)",
            "`type: {self.type}` has no lower bound, so this field does nothing",
            "remove `floor`, or write `type: {more}`",
            more=lambda self: self.type.replace("Truncated", "Masked"),
            server="remove floor, or write type: TokenMasked",
        ),
        Rule(
            "floor",
            f"!self.type.endsWith('Masked') || {_CAP} <= 0.0 || {_FLOOR} <= {_CAP}",
            "{self.bounds[1]:g} is above `cap` ({self.bounds[0]:g}): every ratio would be dropped",
            "write `floor: {self.bounds[0]:g}` or less, or raise `cap`",
            server="write floor no higher than cap, or raise cap",
        ),
    )


class Overlong(Block):
    """Penalises the reward of completions that come near `rollout.sampling.maxNewTokens` (DAPO, eq. 13)."""

    penalty: Annotated[float | None, later_identity(0.0), Field(ge=0, le=1_000_000)] = None
    """Amount subtracted from the reward of a completion of `maxNewTokens`; 0 subtracts nothing. If unset, the default
    of `type`."""
    buffer_share: Annotated[float, LATER_IDENTITY, Field(gt=0, le=1)] = BUFFER_SHARE
    """The penalty grows from 0 to its full amount over the last tokens, which are this share of `maxNewTokens`."""


class DynamicSampling(Block):
    """Replaces groups whose rewards are all equal, which teach nothing, by other prompts (DAPO, section 3.2)."""

    max_rounds: Annotated[int | None, later_identity(0), Field(ge=0, le=1000)] = None
    """Maximum number of times that a step draws further prompts; after that it trains on what it has. 0 keeps equal
    groups in the batch. If unset, the default of `type`."""


class Critic(Block):
    """The value model of `advantage.baseline: Critic`: a second adapter of the same kind, with a value head, on the
    same base."""

    learning_rate: Annotated[float | None, LATER_IDENTITY, Field(gt=0, le=1)] = None
    """Peak learning rate of the critic's own optimiser, with the schedule of the adapter. If unset,
    `training.learningRate`."""
    rank: Annotated[int | None, LATER_IDENTITY, Field(ge=1, le=1024)] = None
    """With LoRA: rank of the critic's adapter. If unset, the policy's rank."""
    gamma: Annotated[float, LATER_IDENTITY, Field(ge=0, le=1)] = 1.0
    """Discount from one sampled token to the next."""
    gae_lambda: Annotated[float, LATER_IDENTITY, Field(ge=0, le=1)] = 1.0
    """0 gives advantages over one token's step, which rely on the critic; 1 gives advantages over the whole completion,
    which do not (arXiv:1506.02438). 1 is what https://arxiv.org/abs/2503.24290 found best, and verl's default."""
    value_clip: Annotated[float, LATER_IDENTITY, Field(gt=0, le=1_000_000)] = 0.2
    """A value counts as moved by at most this much from its value before the step."""
    warmup_steps: Annotated[int, LATER_IDENTITY, Field(ge=0, le=1_000_000)] = 0
    """Number of first steps in which only the critic learns."""
    bootstrap_truncated: Annotated[bool, LATER_IDENTITY] = False
    """A truncated completion is worth its reward plus what the critic expects after its last token."""


class Algorithm(Block):
    """The learning rule."""

    type: Annotated[AlgorithmType, IDENTITY] = "GRPO"
    """The objective, and the default of every field below that is unset: docs/reference/algorithms.md."""
    entrypoint: Annotated[Entrypoint | None, LATER_IDENTITY, Field(examples=["my_objective:loss"])] = None
    """With `type: Custom`: the loss of each token, a function of yours, `module:function`."""
    group_size: Annotated[int, IDENTITY, Field(ge=1, le=4096)] = 8
    """Rollouts per prompt. A group of one has no gradient, except with `advantage.baseline: None` and `Critic`."""
    kl: KL = KL()
    """Divergence from the base."""
    clip: Clip = Clip()
    """Limits of the probability ratio."""
    advantage: Advantage = Advantage()
    """How rewards become advantages."""
    reduction: Annotated[Reduction | None, IDENTITY] = None
    """Mean over all tokens; mean over sequences of each sequence's mean; or sum divided by a constant length. If unset,
    the default of `type`."""
    importance_sampling: ImportanceSampling = ImportanceSampling()
    """Correction of trainer against engine."""
    overlong: Overlong = Overlong()
    """Penalty on length."""
    dynamic_sampling: DynamicSampling = DynamicSampling()
    """Replacement of groups that teach nothing."""
    critic: Critic | None = None
    """Settings of `advantage.baseline: Critic`, which is PPO's. If unset, a critic with default settings where one is
    used."""

    teacher: Teacher | None = None
    """On-policy distillation, in addition to the algorithm's own loss or, with `type: Distillation`, on its own. If
    unset, there is no teacher."""

    @property
    def decided_teacher(self) -> Teacher | None:
        return self.teacher.decided if self.teacher else None

    @property
    def decided_critic(self) -> Critic | None:
        """None: the objective has none."""
        return (self.critic or Critic()) if self.objective.baseline == "Critic" else None

    @property
    def objective(self) -> Objective:
        """The row of `type`, with the values that this manifest sets."""
        asked: dict[str, Any] = {
            "baseline": self.advantage.baseline,
            "normalize": self.advantage.normalize,
            "clip_low": self.clip.low,
            "clip_high": self.clip.high,
            "reduction": self.reduction,
            "kl_placement": self.kl.placement,
            "kl_estimator": self.kl.estimator,
            "overlong_penalty": self.overlong.penalty,
            "max_rounds": self.dynamic_sampling.max_rounds,
        }
        found = {name: value for name, value in asked.items() if value is not None}
        if self.advantage.entrypoint is not None:
            found |= {"baseline": None, "normalize": None}
        return replace(OBJECTIVES[self.type], **found)

    def decided(self) -> Algorithm:
        """A copy with every field written out that the type decides; fields that it does not read stay unset."""
        objective = self.objective
        cap, floor = self.importance_sampling.bounds
        changes: dict[str, tuple[Block, dict[str, Any]]] = {
            "kl": (self.kl, {"placement": objective.kl_placement, "estimator": objective.kl_estimator}),
            "clip": (self.clip, {"low": objective.clip_low, "high": objective.clip_high}),
            "advantage": (self.advantage, {"baseline": objective.baseline, "normalize": objective.normalize}),
            "importance_sampling": (self.importance_sampling, {"cap": cap, "floor": floor}),
            "overlong": (self.overlong, {"penalty": objective.overlong_penalty}),
            "dynamic_sampling": (self.dynamic_sampling, {"max_rounds": objective.max_rounds}),
        }
        if self.type in UNREWARDED:
            for block, name in IDLE_WITHOUT_REWARD:
                changes[block][1].pop(name)
        blocks = {name: block.model_copy(update=update) for name, (block, update) in changes.items()}
        decided = {"reduction": objective.reduction, "critic": self.decided_critic, "teacher": self.decided_teacher}
        return self.model_copy(update={**blocks, **decided})

    rules = (
        Rule(
            "type",
            "self.type != 'Custom' || has(self.entrypoint)",
            "`type: Custom` needs the loss that it stands for",
            "add `entrypoint: module:function`",
        ),
        Rule(
            "entrypoint",
            "self.type == 'Custom' || !has(self.entrypoint)",
            "`type: {self.type}` has a loss of its own, so this field does nothing",
            "remove `entrypoint`, or write `type: Custom`",
        ),
        *(
            Rule(
                f"advantage.{name}",
                f"!has(self.advantage.entrypoint) || !has(self.advantage.{name})",
                "advantages come from `entrypoint`, so this field does nothing",
                f"remove `{name}` or `entrypoint`",
            )
            for name in ("baseline", "normalize")
        ),
        Rule(
            "clip.low",
            f"!(self.type in {_UNBOUNDED}) || !has(self.clip.low)",
            "`type: {self.type}` has no lower bound, so this field does nothing",
            "remove `low`",
            server="remove it: this type has no lower bound",
        ),
        Rule(
            "clip.low",
            f"self.type in {_UNBOUNDED} || {_HIGH} < 0.0 || {_LOW} <= {_HIGH}",
            "{self.objective.clip_low:g} is above `high` ({self.objective.clip_high:g}): good samples would be clipped"
            " before bad ones",
            "write `low: {self.objective.clip_high:g}` or less, or raise `high`",
            server="write low no higher than high, or raise high",
        ),
        Rule(
            "teacher",
            "self.type != 'SFT' || !has(self.teacher)",
            "`type: SFT` learns from demonstrations and uses no teacher",
            "remove `teacher`, or write `type: Distillation`",
        ),
        Rule(
            "type",
            "self.type != 'Distillation' || has(self.teacher)",
            "`type: Distillation` learns from a teacher alone",
            "add `teacher: {{type: Adapter, uri: …}}`",
        ),
        *(
            Rule(
                f"{block}.{name}",
                f"!(self.type in {list(UNREWARDED)}) || !has(self.{block}.{name})",
                "under `type: {self.type}` no reward and no ratio enters the loss, so this field does nothing",
                f"remove `{name}`, or write another `type`",
            )
            for block, name in IDLE_WITHOUT_REWARD
        ),
        Rule(
            "critic",
            f"!has(self.critic) || (!has(self.advantage.entrypoint) && {_BASELINE} == 'Critic')",
            "no critic is used, so this block does nothing",
            "remove `critic`, or write `type: PPO` or `advantage: {{baseline: Critic, normalize: Batch}}`",
        ),
        Rule(
            "advantage.normalize",
            f"has(self.advantage.entrypoint) || !({_BASELINE} in ['None', 'Critic']) || {_NORMALIZE} != 'Group'",
            "without a baseline from its group nothing is compared within a group",
            "write `normalize: Batch` or `normalize: None`, or another `baseline`",
            rests_on=("type", "advantage.baseline"),
        ),
        Rule(
            "kl.importanceWeighted",
            f"!self.kl.importanceWeighted || {_PLACEMENT} == 'Loss'",
            "a divergence in the reward has no gradient, so this field does nothing",
            "remove `importanceWeighted`, or write `placement: Loss`",
        ),
        Rule(
            "kl.importanceWeighted",
            f"!self.kl.importanceWeighted || {_PLACEMENT} != 'Loss' || {_ESTIMATOR} != 'K2'",
            "`K2` has the right gradient as it is, and a wrong one when it is weighted",
            "remove `importanceWeighted`, or write `estimator: K1` or `estimator: K3`",
            rests_on=("type", "kl.estimator"),
        ),
        Rule(
            "overlong.bufferShare",
            f"{_PENALTY} != 0.0 || self.overlong.bufferShare == {BUFFER_SHARE}",
            "nothing is taken off while `penalty` is 0, so this field does nothing",
            "remove `bufferShare`, or write `penalty: 1`",
        ),
        Rule(
            "dynamicSampling.maxRounds",
            f"self.groupSize != 1 || {max_rounds('self')} <= 0",
            "the rewards of a group of one are always equal: every group would be replaced",
            "write `groupSize: 2` or more, or `maxRounds: 0`",
        ),
    )
