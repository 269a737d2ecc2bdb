"""The algorithms that a manifest can name: what each is made of, and where its numbers come from.

Belongs here: one row per algorithm, which is also the default of every field that depends on `algorithm.type`; torch
is not needed to read it. Does not belong here: the arithmetic that the names stand for (`algorithms`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Surrogate = Literal["Clipped", "ClippedWeights", "Teacher", "Likelihood", "Own"]
"""`Clipped`: min(ratio * A, clip(ratio) * A), PPO, https://arxiv.org/abs/1707.06347 eq. 7. `ClippedWeights`:
clip(ratio) without its gradient, times A * log-prob, CISPO. `Teacher`: nothing; all there is to learn is the teacher's.
`Likelihood`: -log-prob, of what demonstrations answer. `Own`: a function of the user's."""
Ratio = Literal["Token", "SequenceMean", "SequenceSum"]
"""The ratio of new to old probability: of each token; of the whole answer, its log-ratios averaged over the tokens; of
the whole answer, its log-ratios added up."""
Baseline = Literal["GroupMean", "LeaveOneOut", "LengthWeighted", "Critic", "None"]
Normalize = Literal["Group", "Batch", "None"]
Reduction = Literal["Token", "Sequence", "Constant"]
KLPlacement = Literal["Loss", "Reward"]
KLEstimator = Literal["K1", "K2", "K3"]
CorrectionType = Literal[
    "None", "TokenTruncated", "TokenMasked", "SequenceTruncated", "SequenceMasked", "GeometricMasked"
]
AlgorithmType = Literal[
    "GRPO",
    "DrGRPO",
    "DAPO",
    "GSPO",
    "CISPO",
    "RLOO",
    "OPO",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "PPO",
    "Distillation",
    "SFT",
    "Custom",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One combination. A field of the manifest that is left out has the value of its type's row."""

    name: str
    paper: str
    surrogate: Surrogate = "Clipped"
    ratio: Ratio = "Token"
    baseline: Baseline | None = "GroupMean"
    """None: advantages come from a function of the user's."""
    normalize: Normalize | None = "Group"
    clip_low: float | None = 0.2
    """None: there is no lower bound, and the manifest may not name one."""
    clip_high: float = 0.2
    reduction: Reduction = "Token"
    kl_placement: KLPlacement = "Loss"
    kl_estimator: KLEstimator = "K3"
    overlong_penalty: float = 0.0
    max_rounds: int = 0
    source: str
    """Where the defaults are from."""


OBJECTIVES: Mapping[AlgorithmType, Objective] = {
    "GRPO": Objective(
        name="GRPO",
        paper="https://arxiv.org/abs/2402.03300",
        source="advantage: section 4.1.2; clip and K3 in the loss: eq. 3 and 4; every token of the batch counts the "
        "same, which the paper does by answer (`reduction: Sequence`)",
    ),
    "DrGRPO": Objective(
        name="Dr. GRPO",
        paper="https://arxiv.org/abs/2503.20783",
        normalize="None",
        reduction="Constant",
        source="section 3.2: neither the deviation of the group nor the length of an answer enters",
    ),
    "DAPO": Objective(
        name="DAPO",
        paper="https://arxiv.org/abs/2503.14476",
        clip_high=0.28,
        overlong_penalty=1.0,
        max_rounds=10,
        source="clip-higher 0.2 and 0.28: section 3.1 and 4.1; dynamic sampling: section 3.2, ten rounds as in verl's "
        "recipe (`max_num_gen_batches`); token mean: eq. 8; overlong: eq. 13, a buffer of 4096 of 20480 tokens",
    ),
    "GSPO": Objective(
        name="GSPO",
        paper="https://arxiv.org/abs/2507.18071",
        ratio="SequenceMean",
        clip_low=3e-4,
        clip_high=4e-4,
        reduction="Sequence",
        source="ratio: eq. 7; objective: eq. 5, with the clip ranges of the paper's experiments, 3e-4 and 4e-4",
    ),
    "CISPO": Objective(
        name="CISPO",
        paper="https://arxiv.org/abs/2506.13585",
        surrogate="ClippedWeights",
        clip_low=None,
        clip_high=4.0,
        source="eq. 4 and 5: weights without gradient and without a lower bound; their cap, 5, from ScaleRL "
        "(https://arxiv.org/abs/2510.13786), as TRL recommends",
    ),
    "RLOO": Objective(
        name="RLOO",
        paper="https://arxiv.org/abs/2402.14740",
        ratio="SequenceSum",
        baseline="LeaveOneOut",
        normalize="None",
        reduction="Sequence",
        kl_placement="Reward",
        kl_estimator="K1",
        source="the answer is one action, its baseline the mean of the others; K1 in the reward; clip "
        "0.2 as in TRL 1.16, for updates after a step's first",
    ),
    "OPO": Objective(
        name="OPO",
        paper="https://arxiv.org/abs/2505.23585",
        baseline="LengthWeighted",
        normalize="None",
        source="the baseline of least variance, rewards weighted by length; exactly on-policy, so that "
        "nothing is clipped: leave `training.miniBatchPrompts` and `training.updateEpochs` alone",
    ),
    "ReinforcePlusPlus": Objective(
        name="REINFORCE++",
        paper="https://arxiv.org/abs/2501.03262",
        baseline="None",
        normalize="Batch",
        kl_placement="Reward",
        kl_estimator="K1",
        source="no baseline, returns normalised over all tokens of the step; K1 in the reward, from each token on; as "
        "in verl 0.9 and OpenRLHF",
    ),
    "ReinforcePlusPlusBaseline": Objective(
        name="REINFORCE++ with baseline",
        paper="https://arxiv.org/abs/2501.03262",
        normalize="Batch",
        kl_estimator="K2",
        source="the group's mean, then normalised over all tokens of the step; K2 in the loss; as in verl 0.9 and "
        "OpenRLHF",
    ),
    "PPO": Objective(
        name="PPO",
        paper="https://arxiv.org/abs/1707.06347",
        baseline="Critic",
        normalize="Batch",
        kl_placement="Reward",
        kl_estimator="K1",
        source="clip: eq. 7; advantages by GAE (https://arxiv.org/abs/1506.02438 eq. 16) against a critic, normalised "
        "over all tokens of the step, K1 in the reward of each token: as in TRL 1.16 and verl 0.9",
    ),
    "Distillation": Objective(
        name="on-policy distillation",
        paper="https://arxiv.org/abs/2306.13649",
        surrogate="Teacher",
        baseline="None",
        normalize="None",
        clip_low=None,
        source="GKD, eq. 2 with lambda 1: the student's own answers, a divergence from the teacher in each token, no "
        "reward; `algorithm.teacher` says which divergence and from whom. Thinking Machines, On-Policy Distillation "
        "(2025), is `teacher: {over: Sampled}`",
    ),
    "SFT": Objective(
        name="supervised fine-tuning",
        paper="https://arxiv.org/abs/2203.02155",
        surrogate="Likelihood",
        baseline="None",
        normalize="None",
        clip_low=None,
        source="cross-entropy of the demonstrations' answers (InstructGPT, section 3.5), every token of an update "
        "counting the same, as in TRL's SFTTrainer; nothing is sampled and nothing is scored",
    ),
    "Custom": Objective(
        name="your own",
        paper="",
        surrogate="Own",
        source="`algorithm.entrypoint` names the loss; everything around it is as in GRPO",
    ),
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a correction's weights if the manifest names none."""

    cap: float
    floor: float | None
    """None: there is no lower bound, and the manifest may not name one."""
    source: str


CORRECTIONS: Mapping[CorrectionType, Bounds] = {
    "None": Bounds(2.0, None, ""),
    "TokenTruncated": Bounds(2.0, None, "FlashRL, fengyao.notion.site/flash-rl"),
    "TokenMasked": Bounds(5.0, 0.5, "IcePop, https://arxiv.org/abs/2510.18855"),
    "SequenceTruncated": Bounds(2.0, None, "verl 0.9, `rollout_is: sequence`"),
    "SequenceMasked": Bounds(2.0, 0.5, "verl 0.9, `rollout_is: sequence` with a threshold `lower_upper`"),
    "GeometricMasked": Bounds(
        1.001,
        0.999,
        "verl 0.9, `rollout_rs: seq_mean_k1`, which bounds 1 / ratio and averages what is left",
    ),
}
