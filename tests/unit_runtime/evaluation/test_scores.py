"""Scores and intervals against their definitions, written out the slow way."""

from __future__ import annotations

from itertools import combinations
from random import Random
from statistics import NormalDist, fmean, stdev

import pytest

from orbit_runtime.cli.evaluate import print_summary
from orbit_runtime.evaluation.page import render_evaluation
from orbit_runtime.evaluation.records import EvalSample
from orbit_runtime.evaluation.scores import estimate, paired, pass_at_k, pass_ks
from orbit_runtime.evaluation.summary import build_summary


def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_with_one_that_passes() -> None:
    for samples in range(1, 9):
        for passed in range(samples + 1):
            outcomes = [index < passed for index in range(samples)]
            for k in range(1, samples + 1):
                chosen = [any(each) for each in combinations(outcomes, k)]
                assert pass_at_k(samples, passed, k) == pytest.approx(fmean(chosen), abs=1e-12)


def test_pass_at_k_of_thousands_of_samples_neither_overflows_nor_leaves_its_bounds() -> None:
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5, abs=1e-9)
    assert 0 < pass_at_k(100_000, 10, 1) < pass_at_k(100_000, 10, 1000) < 1


def test_an_interval_holds_the_true_mean_about_as_often_as_it_says() -> None:
    random = Random(3)
    held = 0
    for _ in range(600):
        chances = [random.betavariate(2, 3) for _ in range(80)]
        found = estimate([fmean(random.random() < chance for _ in range(4)) for chance in chances])
        held += found.low <= 0.4 <= found.high  # type: ignore[operator]
    assert 0.92 <= held / 600 <= 0.98


def test_a_mean_of_nothing_but_ones_has_the_exact_interval_of_a_share() -> None:
    found = estimate([1.0] * 10)
    # With this chance of passing, ten passes of ten happen 2.5 times in a hundred.
    assert (found.mean, found.high) == (1.0, 1.0)
    assert found.low is not None
    assert found.low**10 == pytest.approx(0.025)
    assert estimate([0.0] * 10).high == pytest.approx(1 - found.low)


def test_one_prompt_and_none_have_no_interval() -> None:
    assert (estimate([0.5]).mean, estimate([0.5]).low, estimate([]).mean) == (0.5, None, None)


def test_a_paired_difference_is_over_the_prompts_that_both_have_and_takes_out_what_these_share() -> None:
    random = Random(5)
    hardness = {f"p{index}": random.random() for index in range(50)}
    first = dict(hardness)
    second = {prompt: value + 0.1 + random.gauss(0, 0.01) for prompt, value in hardness.items()}
    found = paired({**first, "only-here": 9.0}, second)
    differences = [second[prompt] - first[prompt] for prompt in first]
    half = NormalDist().inv_cdf(0.975) * stdev(differences) / 50**0.5
    assert found.difference.prompts == 50
    assert found.difference.low == pytest.approx(fmean(differences) - half)
    assert (found.verdict, found.better, found.worse) == ("better", 50, 0)
    assert paired(second, first).verdict == "worse"
    worst, best = {f"p{index}": 0.0 for index in range(20)}, {f"p{index}": float(index > 0) for index in range(20)}
    assert (paired(worst, best).difference.high, paired(best, worst).difference.low) == (1.0, -1.0)
    # Not paired, the same numbers show nothing.
    apart = estimate(list(first.values())), estimate(list(second.values()))
    assert apart[0].high > apart[1].low  # type: ignore[operator]


@pytest.mark.parametrize(("prompts", "is_shown"), [(2, False), (5, False), (6, True)])
def test_a_few_equal_differences_are_no_verdict(prompts: int, is_shown: bool) -> None:
    before, after = ({str(at): value for at in range(prompts)} for value in (0.0, 1.0))
    assert paired(before, after).verdict == ("better" if is_shown else "no difference shown")


def test_the_ks_that_are_told() -> None:
    assert [pass_ks(samples) for samples in (1, 4, 6)] == [(1,), (1, 2, 4), (1, 2, 4, 6)]


def test_any_two_models_are_compared_prompt_by_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    rewards = {"base": (0.0, 0.0, 1.0), "step-10": (1.0, 0.0, 1.0), "step-20": (1.0, 1.0, 0.0)}
    samples = [
        EvalSample(subject, "sums", f"p{prompt}", 0, (), reward, "value")
        for subject, values in rewards.items()
        for prompt, reward in enumerate(values)
    ]
    summary = build_summary(samples)
    assert [(each.first, each.second) for each in summary.comparisons] == [("base", "step-10"), ("base", "step-20")]
    (pair,) = summary.pairs
    assert (pair.first, pair.second) == ("step-10", "step-20")
    assert pair.paired.difference.mean == pytest.approx(0.0)
    assert (pair.paired.better, pair.paired.worse) == (1, 1)
    page = render_evaluation("Two steps", summary, samples)
    assert "Any two others: 1 pair<" in page
    print_summary(summary)
    assert "better on 2 of 3 prompts, worse on 1: " in capsys.readouterr().out


def test_a_folded_answer_says_what_was_asked() -> None:
    samples = [
        EvalSample("base", "sums", name, 0, (("system", "Be brief."), ("user", text), ("assistant", "3")), 1.0, "value")
        for name, text in (("a", "1 <\n 2?"), ("b", "word " * 40))
    ]
    page = render_evaluation("Two prompts", build_summary(samples), samples)
    assert '<summary>sums: a <span class="label">1 &lt; 2?</span></summary>' in page
    assert f'<span class="label">{"word " * 14}…</span></summary>' in page
    assert "Be brief." not in page
    assert page.count("1 &lt;\n 2?") == 1, "an answer begins with the model's first turn"
