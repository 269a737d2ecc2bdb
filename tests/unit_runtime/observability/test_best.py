"""The best adapter of a run: which it is, and that one address means it at every door."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime import Headline, Report
from orbit_runtime.checkpoints.adapter_folder import adapter_address, saved_steps
from orbit_runtime.cli.output import outcomes
from orbit_runtime.errors import UsageError
from orbit_runtime.observability.report import build_report
from orbit_runtime.observability.report_html import render_html
from orbit_runtime.observability.run_folder import (
    BestVersion,
    find_best,
    find_stop,
    read_evaluations,
    read_own_evaluations,
)
from orbit_runtime.storage import open_store
from tests.fakes.run_folder import SyntheticRun, write_run_folder


def write(folder: Path, means: dict[int, float | None], *, kept: list[int], **keep_best: Any) -> Path:
    """A run of 24 steps with evaluations of these steps. Args: kept: steps whose adapters are there."""
    write_run_folder(folder, SyntheticRun(steps=24, spec={"checkpoint": {"keepBest": keep_best}}))
    for step in kept:
        manifest = {"format": 1, "facts": {"version": step, "digest": digest(step)}}
        for name, content in (("manifest.json", json.dumps(manifest)), ("adapter_config.json", "{}")):
            file = folder / f"adapters/policy-v{step}/{name}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
    for step, mean in means.items():
        evaluate(folder, step, mean)
    return folder


def digest(step: int) -> str:
    return f"tree:{step:064x}"


def evaluate(folder: Path, step: int, mean: float | None, *, adapter: str = "", settings: Any = None) -> None:
    numbers = {"mean": mean, "low": None, "high": None, "prompts": 4}
    scores = [
        {"environment": name, "average": average, "pass_at": {"1": average, "4": passed}, "samples": 16, "failed": 0,
         "prompt_tokens": 1, "completion_tokens": 1, "cost": None}
        for name, average, passed in (("a", numbers, {**numbers, "mean": 0.5 - step / 100}),
                                      ("b", {**numbers, "mean": step / 100}, numbers))
    ]  # fmt: skip
    content = {
        "step": step, "policy_version": step, "adapter_digest": adapter or digest(step), "scores": scores,
        "settings": settings or {"a": 1, "b": 1},
    }  # fmt: skip
    file = folder / f"evaluation/step-{step:06d}/summary.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


MEANS = {0: 0.1, 12: 0.8, 18: 0.8, 24: 0.7}


def test_the_best_has_the_highest_mean_and_of_equal_ones_the_earlier(tmp_path: Path) -> None:
    store = open_store(str(write(tmp_path, MEANS, kept=[0, 12, 18, 24])))
    assert find_best(store)[:2] == [BestVersion(12, "a", 0.8), BestVersion(18, "a", 0.8)]
    assert find_best(store, until=11) == [BestVersion(0, "a", 0.1)]


@pytest.mark.parametrize(
    ("keep_best", "step"), [({"evaluation": "b"}, 24), ({"metric": "PassAt"}, 0), ({"evaluation": "a"}, 12)]
)
def test_another_evaluation_or_metric_may_decide(keep_best: dict[str, str], step: int, tmp_path: Path) -> None:
    store = open_store(str(write(tmp_path, MEANS, kept=[0, 12, 18, 24], **keep_best)))
    assert find_best(store)[0].step == step


@pytest.mark.parametrize(
    ("asked", "step", "why"),
    [
        ({"atLeast": 0.8}, 12, "a was 0.8 at step 12 (training.stopWhen.atLeast: 0.8)"),
        ({"atLeast": 0.8}, 11, None),
        ({"atLeast": 0.81}, 24, None),
        ({"withoutGainSteps": 12}, 24, "a has not risen above 0.8 of step 12 for 12 steps (training.stopWhen)"),
        ({"withoutGainSteps": 7}, 23, None),
        ({"withoutGainSteps": 13}, 24, None),
        ({"withoutGainSteps": 6, "evaluation": "b"}, 24, None),
        ({"withoutGainSteps": 24, "metric": "PassAt"}, 24,
         "a has not risen above 0.5 of step 0 for 24 steps (training.stopWhen)"),
    ],
)  # fmt: skip
def test_a_run_ends_once_it_is_good_enough_or_gets_no_better(
    asked: dict[str, Any], step: int, why: str | None, tmp_path: Path
) -> None:
    store = open_store(str(write(tmp_path, MEANS, kept=[24])))
    assert find_stop(asked, 6, read_evaluations(store), {}, step) == why


@pytest.mark.parametrize("asked", [{"atLeast": -1000}, {"withoutGainSteps": 1}])
def test_an_evaluation_without_a_score_ends_no_run(asked: dict[str, Any], tmp_path: Path) -> None:
    store = open_store(str(write(tmp_path, {0: None, 6: math.nan}, kept=[])))
    assert find_stop(asked, 6, read_evaluations(store), {}, 6) is None
    assert find_stop(asked, 6, {}, {"first": math.nan, "best": math.inf, "best_step": 0}, 6) is None


@pytest.mark.parametrize(("asked", "ends"), [(digest(12), True), ("tree:another", False)])
def test_an_evaluation_of_another_adapter_ends_no_run(asked: str, ends: bool, tmp_path: Path) -> None:
    folder = write(tmp_path, {12: 0.9}, kept=[])
    row = {"step": 12, "adapter_digest": digest(12)}
    (folder / "metrics").mkdir(exist_ok=True)
    (folder / "metrics/step-000012.json").write_text(json.dumps(row))
    evaluate(folder, 12, 0.9, adapter=asked)
    found = read_own_evaluations(open_store(str(folder)))
    assert bool(find_stop({"atLeast": 0.8}, 6, found, {}, 12)) == ends


def test_an_evaluation_counts_for_the_adapter_that_it_asked_and_with_the_settings_of_the_newest(tmp_path: Path) -> None:
    folder = write(tmp_path, MEANS, kept=[0, 12, 18, 24])
    evaluate(folder, 12, 0.9, adapter="tree:another")
    evaluate(folder, 18, 0.9, settings={"a": 2, "b": 1})
    assert [each.step for each in find_best(open_store(str(folder)))] == [24, 0]


@pytest.mark.parametrize("value", [None, math.nan])
def test_a_policy_without_a_number_is_never_the_best(value: float | None, tmp_path: Path) -> None:
    store = open_store(str(write(tmp_path, MEANS | {12: value}, kept=[0, 12, 18, 24])))
    assert [each.step for each in find_best(store)] == [18, 24, 0]


def test_one_address_names_the_best_the_newest_and_a_step(tmp_path: Path) -> None:
    folder = write(tmp_path, MEANS, kept=[0, 12, 24])
    best = (f"{folder}/adapters/policy-v12", "the best of its run, a 0.800 at step 12")
    newest = (f"{folder}/adapters/policy-v24", "the newest of its run")
    assert [adapter_address(f"{folder}{end}") for end in ("", "@best", "/@best")] == [best] * 3
    assert adapter_address(f"{folder}@newest") == newest
    assert adapter_address(f"{folder}@step-12") == (best[0], "step-12 of its run")
    assert adapter_address(best[0]) == (best[0], "")
    with pytest.raises(UsageError, match="the run keeps no adapter of step 7; it keeps: 0, 12, 22, 23, 24"):
        adapter_address(f"{folder}@step-7")
    assert adapter_address(str(tmp_path / "empty")) is None
    assert [each.name for each in saved_steps(open_store(str(folder)), [12], first=True)] == ["step-12"]


def test_a_run_that_never_evaluated_has_no_best(tmp_path: Path) -> None:
    folder = write(tmp_path, {}, kept=[24])
    assert adapter_address(str(folder)) == (f"{folder}/adapters/policy-v24", "the newest of its run")
    with pytest.raises(UsageError, match="none is its best"):
        adapter_address(f"{folder}@best")


def test_the_newest_adapter_is_the_best_where_demonstrations_are_held_out(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path, SyntheticRun(steps=24, spec={"data": {"validation": {"prompts": []}}}))
    assert adapter_address(f"{folder}@best") == (f"{folder}/adapters/policy-v24", "the newest of its run")


def test_a_report_names_the_best_and_how_much_lower_the_last_is(tmp_path: Path) -> None:
    facts = build_report(open_store(str(write(tmp_path, MEANS, kept=[0, 12, 24])))).to_json()
    assert facts["best"] == {"step": 12, "evaluation": "a", "value": 0.8}
    assert dict(outcomes(facts))["a"] == "0.100 at step 0, 0.700 at step 24; best 0.800 at step 12, last 0.100 lower"


def test_every_door_has_the_same_headline_and_an_evaluation_is_it_where_there_is_one(tmp_path: Path) -> None:
    folder = write(tmp_path / "evaluated", MEANS, kept=[0, 12, 24])
    report, shown = build_report(open_store(str(folder))), Report(folder)
    assert report.to_json()["headline"] == {"name": "a", "first": 0.1, "last": 0.7, "steps": None}
    assert shown.headline == Headline("a", 0.1, 0.7)
    assert "a first 0.1000, last 0.7000" in str(shown)
    assert "0.100 → 0.700" in (page := render_html(report))
    assert [page.count(words) for words in ("best 0.800 at step 12", "</i>best, step 12")] == [1, 1]
    plain = build_report(open_store(str(write_run_folder(tmp_path / "plain", SyntheticRun(steps=60)))))
    gain = plain.to_json()["gain"]
    headline = {"name": "reward", "first": gain["first"], "last": gain["last"], "steps": 12}
    assert plain.to_json()["headline"] == headline
    assert Report(tmp_path / "plain").headline == Headline(**headline)
    assert f"{gain['first']:.4f} in the first 12 steps" in dict(outcomes(plain.to_json()))["reward"]


def test_a_report_of_an_evaluation_without_a_score_says_so(tmp_path: Path) -> None:
    facts = build_report(open_store(str(write(tmp_path, dict.fromkeys(MEANS), kept=[24])))).to_json()
    assert dict(outcomes(facts))["a"] == "no score"


def test_a_damaged_summary_counts_as_absent(tmp_path: Path) -> None:
    folder = write(tmp_path, MEANS, kept=[0, 12, 18, 24])
    for step, content in ((12, "{"), (18, '{"step": 18, "scores": [{}]}')):
        (folder / f"evaluation/step-{step:06d}/summary.json").write_text(content)
    assert [each.step for each in find_best(open_store(str(folder)))] == [24, 0]
