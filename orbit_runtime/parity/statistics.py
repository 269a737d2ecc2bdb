"""Statistics of `d = logp_trainer - logp_sampler`, and their limits.

Belongs here: plain numbers. Does not belong here: tensors, models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

ABSOLUTE_LIMITS = {"BF16": 0.03, "FP8": 0.1, "INT4": 0.05, "NVFP4": 0.1, "MXFP4": 0.1}
"""Largest mean |d| allowed for a precision, whatever its floor: above it something is structurally different.

Each lies above published values of working setups, and below those of faults:

- BF16: 0.0104 (GLM-5.2 with LoRA, miles `lora.md`) and 0.011 (Qwen3-4B, vllm-project/vime#64) work; the same Qwen3-4B
  at 0.036 was an engine that drifted.
- INT4: 0.0126 with the bits that the engine multiplies by, 0.0279 with a BF16 trainer (Qwen3.6-35B, SkyRL#1862).
- FP8: 0.0347 and 0.0196 (GLM-5.2, miles `lora.md`) work; 0.271 was its first, faulty version (miles#1678). NVFP4: about
  0.05 works; 1.4 was due to misplaced experts (miles#2488). MXFP4: 0.0413 and 0.0666 (DeepSeek-V4-Flash, miles#2722).
  For these three the limit is that of slime's CI, `--ci-train-rollout-logprob-abs-diff-threshold`.
"""
DISAGREEMENT = 0.65
"""Largest share of positions with a different most probable token, as a multiple of the square root of the KL
divergence.

Two distributions that are close in KL differ in their first choice only if their two best tokens are nearly tied.
llama.cpp publishes both for Llama 2 7B and Llama 3 8B (`tools/perplexity/README.md`, "Same top p"): 0.26 % at a KL of
2.5e-5 (BF16 against FP16), 1.15 % at 3.7e-4, 2.33 % at 1.4e-3, 2.48 % at 2.1e-3, 3.97 % at 5.5e-3, 5.34 % at 0.0127,
8.10 % at 0.0313, 28.9 % at 0.445: between 0.43 and 0.63 times the root throughout.
"""
TAIL_TOKENS = 1000
"""Fewer tokens give p99, k3 and the share no limit: they are measured, but would depend on a single token."""
SMALLEST_LIMITS = {"float32": 1e-4, "bfloat16": 0.05}
"""By `rounded_to`, because a floor is measured on few tokens and can be exactly 0. FP32: healthy runs stay below 1e-5.
With activations in FP8: 0.0071 on a step's rollouts of `tiny-qwen3`, the worst of 96 steps; most have 1e-6.
BF16: 0.0014 to 0.0021 on a step's rollouts of `tiny-adder`; 0.031 with experts, whose router changes its choice, and
0.035 on a pretrained model of 135 M, both while layers still added in BF16."""
LARGEST_NOISE = {"float32": 0.0, "bfloat16": 0.05}
"""By compute dtype: how far a floor can raise an absolute limit that is lower. In BF16 a pretrained model of 135 M
differs from itself by 0.020, alone and in a batch: few tokens exceed 0.03 by chance, and none this."""
HEALTHY_NOISE = 3.0
"""Largest healthy difference of the two sides, as a multiple of the floor."""


def rounded_to(compute_dtype: str, activation_precision: str) -> str:
    """The dtype whose limits hold. Where activations are rounded, a sum that differs in its last bit takes another code
    now and then, as far away as the next number of BF16 or farther."""
    return compute_dtype if activation_precision == "WeightOnly" else "bfloat16"


@dataclass(frozen=True)
class ParityLimits:
    """The limits of a `Difference`, for one precision or as set in the manifest."""

    mean: float
    p99: float
    k3: float
    outside: float
    top1: float
    """Lower limit: the share of positions where both sides' most probable token agrees."""

    def failures(
        self, *, mean: float, p99: float, k3: float, outside: float, tokens: float, top1: float | None = None
    ) -> Iterator[str]:
        """One phrase per statistic above its limit, NaN included. Example: `p99 |Δ log-prob| 0.41, limit 0.24`."""
        if not mean <= self.mean:
            yield f"mean |Δ log-prob| {mean:.3g}, limit {self.mean:.3g}"
        if tokens < TAIL_TOKENS:
            return
        if not p99 <= self.p99:
            yield f"p99 |Δ log-prob| {p99:.3g}, limit {self.p99:.3g}"
        if not k3 <= self.k3:
            yield f"k3 {k3:.3g}, limit {self.k3:.3g}"
        if not outside <= self.outside:
            yield f"share of ratios outside [0.9, 1.1] {outside:.2%}, limit {self.outside:.2%}"
        if top1 is not None and not top1 >= self.top1:
            yield f"top-1 agreement {top1:.2%}, limit {self.top1:.2%}"


def build_limits(
    precision: str,
    *,
    mean: float | None = None,
    p99: float | None = None,
    k3: float | None = None,
    outside: float | None = None,
) -> ParityLimits:
    """The manifest's own limits; unset ones follow from the precision, and the tail's from the mean's `m`.

    If |d| were exponential with mean m, its p99 would be 4.6 m, k3 about m², and the share of |d| > 0.1 exp(-0.1 / m).
    The share matches a published one: 8.0 % where d has a standard deviation of 0.055, m = 0.039 (trl#6789). Real tails
    are heavier: p99 is allowed 8 m, and k3, which reaches 7 m² for GLM-5.2 in FP8 (0.0027 at m = 0.0196, miles
    `lora.md`), 16 m². The limit of top-1 agreement follows from that of k3: see `DISAGREEMENT`.
    """
    m = ABSOLUTE_LIMITS[precision] if mean is None else mean
    k3 = 16 * m * m if k3 is None else k3
    return ParityLimits(
        mean=m,
        p99=8 * m if p99 is None else p99,
        k3=k3,
        outside=math.exp(-0.1 / m) if outside is None else outside,
        top1=max(0.0, 1.0 - DISAGREEMENT * math.sqrt(k3)),
    )


def base_limit(precision: str, asked: float | None, compute_dtype: str) -> float:
    """Largest mean |d| with no adapter that can still be the same base; a narrower `asked` is enforced by the gate."""
    return max(ABSOLUTE_LIMITS[precision], LARGEST_NOISE[compute_dtype], asked or 0.0)


@dataclass(frozen=True)
class Difference:
    """The difference of two sides on the same tokens."""

    mean: float
    p50: float
    p99: float
    max: float
    k3: float
    """Mean of exp(d) - 1 - d: Schulman's k3 estimate of the KL divergence."""
    outside: float
    """Share of tokens whose probability ratio lies outside [0.9, 1.1]."""
    tokens: int
    top1: float | None = None
    """Share of positions where both sides' most probable token agrees; None if a side does not report it."""

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def build_difference(
    trainer_T: Sequence[float],
    sampler_T: Sequence[float],
    top: tuple[Sequence[int] | None, Sequence[int] | None] = (None, None),
) -> Difference:
    """Example: `build_difference([0.0, -1.0], [0.0, -1.5]).mean == 0.25`.

    Args:
        top: most probable tokens of trainer and sampler.
    """
    d = [a - b for a, b in zip(trainer_T, sampler_T, strict=True)]
    if not d:
        return Difference(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)
    size = sorted(abs(x) for x in d)
    k3 = [math.expm1(x) - x for x in (max(-10.0, min(10.0, x)) for x in d)]
    outside = sum(1 for x in d if not math.log(0.9) <= x <= math.log(1.1))
    return Difference(
        mean=math.fsum(size) / len(size),
        p50=_quantile(size, 0.5),
        p99=_quantile(size, 0.99),
        max=size[-1],
        k3=math.fsum(k3) / len(k3),
        outside=outside / len(d),
        tokens=len(d),
        top1=top1_agreement(*top),
    )


def top1_agreement(trainer_T: Sequence[int] | None, sampler_T: Sequence[int] | None) -> float | None:
    """Share of positions where both agree; None if a side has no tokens, or there is no position."""
    if not trainer_T or not sampler_T:
        return None
    return sum(a == b for a, b in zip(trainer_T, sampler_T, strict=True)) / len(trainer_T)


def _quantile(ordered: Sequence[float], share: float) -> float:
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def resolve_limit(floor: float, *, factor: float, absolute: float, widest: float, rounded: str) -> float:
    """`factor` times the floor, but at least the dtype's smallest limit and at most the absolute one.

    Args:
        widest: where this is more, a floor of more than a third of `absolute` raises that, up to here.
    """
    ceiling = max(absolute, min(HEALTHY_NOISE * floor, widest))
    return min(ceiling, max(factor * floor, SMALLEST_LIMITS[rounded]))
