"""The comparison's arithmetic by hand, and what it refuses to say."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path

import pytest
from fakes.run_folder import SyntheticRun, write_run_folder

from orbit_runtime.cli.report import format_comparison
from orbit_runtime.errors import UsageError
from orbit_runtime.observability.compare import compare, over_seeds
from orbit_runtime.observability.metrics import build_row
from orbit_runtime.observability.report import Report, build_report
from orbit_runtime.observability.report_html import render_comparison
from orbit_runtime.observability.windows import Window, final_reward, noise_margin
from orbit_runtime.storage import open_store


def report_of(folder: Path, pretend: SyntheticRun) -> Report:
    return build_report(open_store(str(write_run_folder(folder, pretend)), writable=False), now=5000.0)


def test_the_standard_error_between_steps_by_hand() -> None:
    rows = [build_row(step=i, reward_mean=mean, reward_std=0.0, reward_value=10)
            for i, mean in enumerate([0.9, 0.4, 0.6, 0.5])]  # fmt: skip
    # The last three: mean 0.5, deviations -0.1 0.1 0, s = sqrt(0.02 / 2) = 0.1, over sqrt(3).
    final = final_reward(rows, 3)
    assert final.steps == 3
    assert final.value == pytest.approx(0.5)
    assert final.standard_error == pytest.approx(0.1 / math.sqrt(3))


def test_the_standard_error_within_steps_by_hand() -> None:
    rows = [build_row(step=i, reward_mean=0.5, reward_std=0.5, reward_value=20, reward_wrong=5) for i in range(4)]
    # No spread between steps; sqrt(4 * 0.25 / 25) / 4 = 0.05.
    assert final_reward(rows, 4).standard_error == pytest.approx(0.05)


def test_the_margin_by_hand() -> None:
    # Equal errors and k = 6: Welch's df is 2 (k - 1) = 10, t = 2.228.
    a = Window(0.5, 0.03, 6)
    assert noise_margin(a, a) == pytest.approx(2.228 * math.sqrt(2) * 0.03)
    # One run without noise: df = k - 1 = 5, t = 2.571.
    assert noise_margin(a, Window(0.5, 0.0, 6)) == pytest.approx(2.571 * 0.03)


def test_better_worse_and_no_difference(tmp_path: Path) -> None:
    reports = [
        report_of(tmp_path / "a", SyntheticRun(name="a")),
        report_of(tmp_path / "b", SyntheticRun(name="b", gain=0.6, seed=2)),
        report_of(tmp_path / "c", SyntheticRun(name="c", gain=0.3, seed=3)),
        report_of(tmp_path / "d", SyntheticRun(name="d", gain=0.5, seed=4)),
    ]
    verdicts = [entry.verdict for entry in compare(reports).entries]
    assert verdicts == ["baseline", "better", "worse", "no difference beyond the margin"]


def test_the_asked_margin_can_only_widen(tmp_path: Path) -> None:
    reports = [
        report_of(tmp_path / "a", SyntheticRun(name="a")),
        report_of(tmp_path / "b", SyntheticRun(name="b", gain=0.6, seed=2)),
    ]
    noise = compare(reports).entries[1].margin
    assert noise is not None
    assert compare(reports, noise / 10).entries[1].margin == noise
    wide = compare(reports, 0.5).entries[1]
    assert (wide.margin, wide.verdict) == (0.5, "no difference beyond the margin")


def test_runs_of_different_tasks_are_not_judged_and_the_fields_are_named(tmp_path: Path) -> None:
    other = {"data": {"prompts": [{"uri": "x.jsonl"}], "seed": 1}, "training": {"steps": 60, "learningRate": 1.0}}
    reports = [
        report_of(tmp_path / "a", SyntheticRun(name="a")),
        report_of(tmp_path / "b", SyntheticRun(name="b", gain=0.6, spec=other)),
    ]
    entry = compare(reports).entries[1]
    assert entry.verdict == "not comparable"
    assert entry.other_task == ("data.prompts",)
    assert [path for path, _, _ in entry.changed] == ["data.prompts", "training.learningRate"]
    page = render_comparison(compare(reports))
    assert "not comparable" in page
    assert "data.prompts" in page


def test_display_fields_are_no_difference(tmp_path: Path) -> None:
    spec = {"training": {"steps": 90, "learningRate": 2e-3}, "checkpoint": {"keep": 9}}
    reports = [
        report_of(tmp_path / "a", SyntheticRun(name="a")),
        report_of(tmp_path / "b", SyntheticRun(name="b", spec=spec)),
    ]
    assert compare(reports).entries[1].changed == ()


def test_one_step_is_too_little(tmp_path: Path) -> None:
    reports = [report_of(tmp_path / name, SyntheticRun(name=name, steps=1)) for name in "ab"]
    assert compare(reports).entries[1].verdict == "too little data"
    empty = [report_of(tmp_path / name, SyntheticRun(name=name, steps=0)) for name in "cd"]
    assert compare(empty).entries[1].verdict == "too little data"
    render_comparison(compare(empty))


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    reports = [report_of(tmp_path / folder, SyntheticRun(name="same")) for folder in "ab"]
    assert [Path(entry.name).name for entry in compare(reports).entries] == ["a", "b"]


def test_the_names_of_namesakes_are_as_short_as_tells_them_apart(tmp_path: Path) -> None:
    places = ("a/run", "b/run", "b/other")
    reports = [report_of(tmp_path / place, SyntheticRun(name="same")) for place in places]
    assert [entry.name for entry in compare(reports).entries] == ["a/run", "b/run", "other"]


def seeded(folder: Path, name: str, seed: int, gain: float, rate: float) -> Report:
    spec = {"data": {"prompts": [{"uri": "builtin://two-digit-addition"}], "seed": seed},
            "training": {"steps": 60, "learningRate": rate}}  # fmt: skip
    return report_of(folder / f"{name}-{seed}", SyntheticRun(name=f"{name}-s{seed}", seed=seed, gain=gain, spec=spec))


def test_runs_that_differ_in_their_seed_are_one_configuration_whose_spread_is_between_seeds(tmp_path: Path) -> None:
    reports = [seeded(tmp_path, "slow", seed, 0.3 + 0.01 * seed, 1e-3) for seed in (1, 2, 3)]
    reports += [seeded(tmp_path, "fast", seed, 0.6 + 0.01 * seed, 2e-3) for seed in (1, 2, 3)]
    comparison = compare(reports)
    slow, fast = comparison.configurations
    assert [(each.name, each.members, each.verdict) for each in (slow, fast)] == [
        ("slow", (0, 1, 2), "baseline"), ("fast", (3, 4, 5), "better"),
    ]  # fmt: skip
    finals = [entry.final.value or 0.0 for entry in comparison.entries]
    assert fast.value == pytest.approx(sum(finals[3:]) / 3)
    within = math.sqrt(sum((entry.final.standard_error or 0.0) ** 2 for entry in comparison.entries[:3])) / 3
    assert slow.standard_error == pytest.approx(max(statistics.stdev(finals[:3]) / math.sqrt(3), within))
    json.dumps(comparison.to_json(), allow_nan=False)
    said = format_comparison(comparison)
    assert "configuration" in said
    assert "each run is one seed" not in said


def test_a_run_that_repeats_a_seed_or_is_of_another_length_is_no_other_seed(tmp_path: Path) -> None:
    reports = [seeded(tmp_path / str(at), "x", seed, 0.3, 1e-3) for at, seed in enumerate((1, 2, 1, 3))]
    assert [each.members for each in compare(reports).configurations] == [(0, 1, 3), (2,)]
    short = report_of(tmp_path / "short", SyntheticRun(name="x", seed=4, steps=20, spec=reports[0].spec))
    assert [each.seeds for each in compare([reports[0], short]).configurations] == [1, 1]


def test_seeds_that_scatter_widen_the_margin(tmp_path: Path) -> None:
    """Welch's interval by hand: means 0.1 apart, s = 0.1 in both, n = 3, df = 4, t = 2.776."""
    a, b = ([Window(base + 0.1 * at, 0.001, 12) for at in (-1, 0, 1)] for base in (0.5, 0.6))
    first, second = over_seeds(a), over_seeds(b)
    assert first.standard_error == pytest.approx(0.1 / math.sqrt(3))
    assert noise_margin(first, second) == pytest.approx(2.776 * math.sqrt(2) * 0.1 / math.sqrt(3))


def test_a_page_of_seeds_draws_a_line_and_a_shade_for_each_configuration(tmp_path: Path) -> None:
    both = (("slow", 0.3, 1e-3), ("fast", 0.6, 2e-3))
    reports = [seeded(tmp_path, name, seed, gain, rate) for name, gain, rate in both for seed in (1, 2)]
    page = render_comparison(compare(reports))
    (chart,) = re.findall(r'<svg[^>]*aria-label="Reward\. .*?</svg>', page, re.DOTALL)
    assert chart.count('class="band') == 2
    assert chart.count('class="line') == 2
    titles = re.findall("<h3>(.*?)</h3>", page)
    assert {"Reward", "Entropy (nats)", "Gradient norm before clipping"} <= set(titles)
    assert len(titles) >= 8, "all curves"


def test_digests_are_folded_on_the_page_and_whole_on_request(tmp_path: Path) -> None:
    reports = []
    digests = ["sha256:" + letter * 64 for letter in "ab"]
    for name, digest in zip("ab", digests, strict=True):
        folder = write_run_folder(tmp_path / name, SyntheticRun(name=name))
        run = json.loads((folder / "run.json").read_text())
        run["identity"] = {"content.model": digest}
        (folder / "run.json").write_text(json.dumps(run))
        reports.append(build_report(open_store(str(folder))))
    page = render_comparison(compare(reports))
    assert f'<code title="{digests[1]}">sha256:bbbbbbbbbbbb…</code>' in page


@pytest.mark.parametrize("margin", [-0.1, math.nan, math.inf])
def test_an_impossible_margin_is_a_usage_error(tmp_path: Path, margin: float) -> None:
    report = report_of(tmp_path, SyntheticRun(steps=1))
    with pytest.raises(UsageError, match="margin"):
        compare([report, report], margin)


def test_other_prompts_make_another_task_wherever_they_lie(tmp_path: Path) -> None:
    reports = []
    for name, digest in (("a", "sha256:1"), ("b", "sha256:2")):
        folder = write_run_folder(tmp_path / name, SyntheticRun(name=name))
        run = json.loads((folder / "run.json").read_text())
        run["identity"] = {"content.data.prompts[0]": digest}
        (folder / "run.json").write_text(json.dumps(run))
        reports.append(build_report(open_store(str(folder))))
    entry = compare(reports).entries[1]
    assert (entry.verdict, entry.other_task) == ("not comparable", ("content.data.prompts[0]",))


def test_runs_of_different_length_say_so_and_are_held_against_each_other_at_the_same_length_too(tmp_path: Path) -> None:
    reports = [
        report_of(tmp_path / "long", SyntheticRun(name="long")),
        report_of(tmp_path / "short", SyntheticRun(name="short", steps=20)),
    ]
    comparison = compare(reports)
    entry = comparison.entries[1]
    # Both learn alike: the short one only had less time.
    assert entry.verdict == "worse"
    assert entry.same_length is not None
    assert (entry.same_length.steps, entry.same_length.verdict) == (20, "no difference beyond the margin")
    assert entry.same_length.difference == 0.0
    assert comparison.to_json()["runs"][1]["same_length"]["steps"] == 20
    said = "short has 20 steps, long 60: the verdict compares the end of one with the end of the other."
    assert said in format_comparison(comparison)
    assert "After 20 steps of each: no difference beyond the margin" in format_comparison(comparison)
    assert "After 20 steps of each: no difference beyond the margin" in render_comparison(comparison)


def test_runs_of_equal_length_need_no_word_about_it(tmp_path: Path) -> None:
    comparison = compare([report_of(tmp_path / name, SyntheticRun(name=name)) for name in "ab"])
    assert comparison.entries[1].same_length is None
    assert "steps of each" not in format_comparison(comparison) + render_comparison(comparison)


def demonstrations(folder: Path, name: str, losses: list[float | None], **data: object) -> Report:
    """A run of SFT that measured what is held out where there is a loss."""
    prompts = {"prompts": [{"uri": "builtin://two-digit-addition"}], "seed": 1, "validation": {"share": 0.1}}
    spec = {"algorithm": {"type": "SFT"}, "data": {**prompts, **data}}
    made = write_run_folder(folder / name, SyntheticRun(name=name, steps=len(losses), spec=spec))
    rows = [build_row(step=at + 1, loss=1.0, validation_loss=loss) for at, loss in enumerate(losses)]
    for row in rows:
        (made / f"metrics/step-{row['step']:06d}.json").write_text(row.to_json())
    (made / "metrics.jsonl").write_text("".join(row.to_json() + "\n" for row in rows))
    return build_report(open_store(str(made), writable=False), now=5000.0)


def falling(end: float) -> list[float | None]:
    """Twelve steps; every second one measures: 1.5, 1.2, 0.9, and then about `end`."""
    losses: list[float | None] = []
    for loss in (1.5, 1.2, 0.9, end + 0.02, end, end - 0.02):
        losses += [None, loss]
    return losses


def test_demonstrations_are_compared_by_their_held_out_loss_and_lower_is_better(tmp_path: Path) -> None:
    """By hand: k = 3 measurements, s = 0.02, se = 0.02 / sqrt(3); Welch's df is 2 * 2 = 4, t = 2.776."""
    reports = [demonstrations(tmp_path, name, falling(end)) for name, end in (("a", 0.5), ("b", 0.3), ("c", 0.9))]
    comparison = compare([*reports, demonstrations(tmp_path, "d", falling(0.49))])
    first, *others = comparison.entries
    assert (first.final.steps, first.final.value) == (3, pytest.approx(0.5))
    assert first.final.standard_error == pytest.approx(0.02 / math.sqrt(3))
    assert [entry.verdict for entry in others] == ["better", "worse", "no difference beyond the margin"]
    assert others[0].difference == pytest.approx(-0.2)
    assert others[0].margin == pytest.approx(2.776 * math.sqrt(2) * 0.02 / math.sqrt(3))
    told = json.loads(json.dumps(comparison.to_json(), allow_nan=False))
    assert (told["measure"], told["runs"][1]["loss_final"], told["runs"][1]["reward_final"]) == (
        "held-out loss", pytest.approx(0.3), None,
    )  # fmt: skip
    assert "held-out loss: mean of the last 3 measurements, lower is better" in format_comparison(comparison)
    page = render_comparison(comparison)
    assert "mean held-out loss of the last 3 measurements; lower is better" in page
    (chart,) = re.findall(r'<svg[^>]*aria-label="Held-out loss[^>]*>.*?</svg>', page, re.DOTALL)
    assert chart.count('class="line') == 4


OTHER_DATA = {
    "data.prompts": {"prompts": [{"uri": "x.jsonl"}]},
    "data.validation.share": {"validation": {"share": 0.2}},
    "data.seed": {"seed": 2},
}


@pytest.mark.parametrize("field", OTHER_DATA)
def test_losses_of_other_held_out_answers_are_not_judged(tmp_path: Path, field: str) -> None:
    reports = [
        demonstrations(tmp_path, "a", falling(0.5)),
        demonstrations(tmp_path, "b", falling(0.3), **OTHER_DATA[field]),
    ]
    entry = compare(reports).entries[1]
    assert (entry.verdict, entry.other_task) == ("not comparable", (field,))


def test_how_often_is_measured_makes_no_other_task_but_nothing_measured_is_too_little(tmp_path: Path) -> None:
    often = demonstrations(tmp_path, "often", falling(0.3), validation={"share": 0.1, "everySteps": 2})
    assert compare([demonstrations(tmp_path, "a", falling(0.5)), often]).entries[1].verdict == "better"
    without = [demonstrations(tmp_path, name, [None] * 6) for name in ("c", "d")]
    assert compare(without).entries[1].verdict == "too little data"
    render_comparison(compare(without))


def test_demonstrations_and_a_run_of_rewards_are_not_judged(tmp_path: Path) -> None:
    both = [demonstrations(tmp_path, "a", falling(0.5)), report_of(tmp_path / "b", SyntheticRun(name="b"))]
    for reports in (both, both[::-1]):
        entry = compare(reports).entries[1]
        assert (entry.verdict, entry.other_task[0]) == ("not comparable", "algorithm.type")
