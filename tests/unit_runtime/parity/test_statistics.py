"""Limits of trainer against engine: what works elsewhere passes by default, what was broken elsewhere does not."""

from __future__ import annotations

import math
import random

import pytest

from orbit_runtime.errors import GateError
from orbit_runtime.loop.metrics_row import check_parity
from orbit_runtime.parity.statistics import (
    DISAGREEMENT,
    TAIL_TOKENS,
    Difference,
    ParityLimits,
    base_limit,
    build_difference,
    build_limits,
    resolve_limit,
)
from orbit_runtime.types import UpdateResult

GOOD = [
    ("BF16", 0.0104, 1.2e-4), ("BF16", 0.011, 6.4e-4), ("INT4", 0.0126, None), ("INT4", 0.0279, None),
    ("FP8", 0.0347, 9.8e-4), ("FP8", 0.0196, 2.7e-3), ("FP8", 0.0347, 5.0e-3), ("NVFP4", 0.05, None),
    ("MXFP4", 0.0666, None),
]  # fmt: skip
BROKEN = [("BF16", 0.036, None), ("FP8", 0.271, 0.060), ("NVFP4", 1.4, None)]


def laplace(mean: float, tokens: int, seed: int) -> Difference:
    """Of a noise whose size is exponential, which has heavier tails than a normal one."""
    draw = random.Random(seed)
    d = [draw.expovariate(1 / mean) * draw.choice((-1, 1)) for _ in range(tokens)]
    return build_difference(d, [0.0] * tokens)


def failures(limits: ParityLimits, found: Difference) -> list[str]:
    return list(
        limits.failures(mean=found.mean, p99=found.p99, k3=found.k3, outside=found.outside, tokens=found.tokens)
    )


@pytest.mark.parametrize(("precision", "mean", "k3"), GOOD)
def test_published_values_of_working_setups_pass_by_default(precision: str, mean: float, k3: float | None) -> None:
    """Their p99 and shares were not published: those of a noise of this mean."""
    limits = build_limits(precision)
    found = laplace(mean, 4096, 0)
    assert failures(limits, found) == []
    assert k3 is None or k3 <= limits.k3


@pytest.mark.parametrize(("precision", "mean", "k3"), BROKEN)
def test_published_values_of_broken_setups_do_not(precision: str, mean: float, k3: float | None) -> None:
    assert failures(build_limits(precision), laplace(mean, 4096, 0))


@pytest.mark.parametrize(("precision", "mean"), [("BF16", 0.0104), ("FP8", 0.0347)])
def test_no_false_alarm_in_500_steps_of_the_fewest_tokens_that_are_gated(precision: str, mean: float) -> None:
    limits = build_limits(precision)
    assert [seed for seed in range(500) if failures(limits, laplace(mean, TAIL_TOKENS, seed))] == []


def test_one_token_in_fifty_that_is_far_off_is_seen_in_the_tail_while_the_mean_holds() -> None:
    """Such as a router that sends some tokens to other experts."""
    d = [0.001] * 980 + [0.8] * 20
    found = build_difference(d, [0.0] * len(d))
    limits = build_limits("BF16")
    assert found.mean <= limits.mean
    assert [each.split()[0] for each in failures(limits, found)] == ["p99"]
    few = build_difference(d[1:], [0.0] * (len(d) - 1))
    assert failures(limits, few) == [], "one token less than tell a p99"


def test_what_is_asked_for_replaces_what_follows() -> None:
    assert build_limits("FP8", mean=0.5) == ParityLimits(0.5, 4.0, 4.0, math.exp(-0.2), 0.0)
    asked = build_limits("FP8", mean=1.0, p99=0.2, k3=0.3, outside=0.4)
    assert asked == ParityLimits(1.0, 0.2, 0.3, 0.4, 1 - DISAGREEMENT * math.sqrt(0.3))


LIMITS = [
    # Too few tokens to show one; a quiet model; a pretrained one of 135 M; a faulty engine; what a manifest asks for.
    ("bfloat16", 0.0, None, 0.03), ("bfloat16", 0.0025, None, 0.03), ("bfloat16", 0.015, None, 0.045),
    ("bfloat16", 1.0, None, 0.05), ("bfloat16", 0.015, 0.01, 0.01),
    ("float32", 0.0, None, 1e-4), ("float32", 1.0, None, 0.03),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "floor", "asked", "limit"), LIMITS)
def test_a_limit_follows_the_floor_and_the_compute_dtype(
    dtype: str, floor: float, asked: float | None, limit: float
) -> None:
    widest = asked or base_limit("BF16", None, dtype)
    absolute = build_limits("BF16", mean=asked).mean
    found = resolve_limit(floor, factor=10.0, absolute=absolute, widest=widest, rounded=dtype)
    assert found == pytest.approx(limit)


@pytest.mark.parametrize("statistic", ["mean", "p99", "k3", "outside"])
@pytest.mark.parametrize("value", [0.9, math.nan])
def test_a_step_is_held_against_every_limit_and_a_nan_fails(statistic: str, value: float) -> None:
    healthy = {"parity_mean": 0.001, "parity_p99": 0.01, "parity_k3": 1e-6, "parity_outside": 0.0, "parity_tokens": 5e3}
    limits = build_limits("BF16")
    check_parity(UpdateResult(healthy, 1, 1), limits, enforce=True)
    spoiled = UpdateResult(healthy | {f"parity_{statistic}": value}, 1, 1)
    with pytest.raises(GateError) as caught:
        check_parity(spoiled, limits, enforce=True)
    assert caught.value.exit_code == 84
    check_parity(spoiled, limits, enforce=False)
    check_parity(UpdateResult({}, 0, 0), limits, enforce=True)


PUBLISHED_TOP1 = {
    2.515e-5: 0.99739, 3.69e-4: 0.98846, 1.355e-3: 0.97674, 2.098e-3: 0.97520, 5.452e-3: 0.96031, 0.012686: 0.94665,
    0.031273: 0.91901, 0.108903: 0.85584, 0.445132: 0.71138,
}  # fmt: skip
"""KL divergence → share of places with one most probable token; llama.cpp, `tools/perplexity/README.md`."""


def test_published_pairs_of_kl_and_top_1_agreement_keep_the_limit_and_a_shuffled_vocabulary_does_not() -> None:
    for kl, agreement in PUBLISHED_TOP1.items():
        limits = build_limits("BF16", k3=kl)
        assert limits.top1 < agreement, (kl, agreement)
        assert limits.top1 > 1 - 2 * (1 - agreement), "the limit is no wider than twice what was published"
    limits = build_limits("BF16")
    good = {"mean": 0.01, "p99": 0.05, "k3": 0.0002, "outside": 0.0, "tokens": TAIL_TOKENS}
    assert not list(limits.failures(**good, top1=0.98))
    assert not list(limits.failures(**good, top1=None)), "an engine that cannot tell is not accused"
    assert list(limits.failures(**good, top1=0.8)) == [f"top-1 agreement 80.00%, limit {limits.top1:.2%}"]
    assert list(limits.failures(**good, top1=math.nan))
    assert not list(limits.failures(**{**good, "tokens": TAIL_TOKENS - 1}, top1=0.8)), "too few to tell"


def test_top_1_agreement_counts_places_and_is_unknown_where_a_side_does_not_tell() -> None:
    assert build_difference([0.0] * 4, [0.0] * 4, ([1, 2, 3, 4], [1, 2, 3, 9])).top1 == 0.75
    assert build_difference([0.0], [0.0], (None, [1])).top1 is None
    assert build_difference([0.0], [0.0]).top1 is None
