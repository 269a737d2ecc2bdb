"""`spec.evaluation.everySteps`: a run measures its policy, and nothing of its training changes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.checkpoints.adapter_folder import adapter_address, open_adapter
from orbit_runtime.cli.main import run_command
from orbit_runtime.cli.run import format_result, summary_of
from orbit_runtime.evaluation.journal import read_samples
from orbit_runtime.loop import run
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.observability.report import build_report
from orbit_runtime.observability.report_html import render_html
from orbit_runtime.observability.run_folder import find_best
from orbit_runtime.observability.termination_message import FILE_VARIABLE
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage import Store, open_store
from tests.integration.killing import adapter_digests, check_same_run, kill_until_done, small_manifest, timeless_rows
from tests.integration.run_launcher import RunLauncher

STEPS, PROMPTS, SAMPLES = 3, 16, 2
pytestmark = pytest.mark.timeout(900)
"""Several starts each; beside other work one alone has taken minutes."""


def manifest(*, max_staleness: int = 0, evaluated: bool = True, **evaluation: Any) -> dict[str, Any]:
    made = small_manifest(steps=STEPS)
    made["spec"]["rollout"]["maxStaleness"] = max_staleness
    made["spec"]["checkpoint"]["keep"] = 9
    if evaluated:
        held_out = [{"name": name, "prompts": [{"uri": f"builtin://two-digit-{name}"}]}
                    for name in ("addition", "multiplication")]  # fmt: skip
        made["spec"]["evaluation"] = {"everySteps": 2, "samples": SAMPLES, "limit": PROMPTS, "environments": held_out,
                                      "concurrency": 16} | evaluation  # fmt: skip
    return made


def train(made: dict[str, Any], out: Path, rewards: Any = None) -> Store:
    run(OrbitRun.model_validate(made), out=str(out), progress=SilentProgress(), rewards=rewards)
    return open_store(str(out))


def summary(store: Store, step: int) -> dict[str, Any]:
    return json.loads(store.get(f"evaluation/step-{step:06d}/summary.json"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return train(manifest(evaluated=False), tmp_path_factory.mktemp("plain") / "run")


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return train(manifest(), tmp_path_factory.mktemp("evaluated") / "run")


def test_training_has_the_same_bits_with_an_evaluation_and_without(plain: Store, evaluated: Store) -> None:
    assert adapter_digests(evaluated) == adapter_digests(plain)
    rows = [
        {name: value for name, value in row.items() if not name.startswith("eval_")} for row in timeless_rows(evaluated)
    ]
    assert rows == timeless_rows(plain)


def test_it_is_asked_before_during_and_after(evaluated: Store) -> None:
    asked = {step: summary(evaluated, step) for step in (0, 2, 3)}
    assert len([key for key in evaluated.list("evaluation") if key.endswith("summary.json")]) == len(asked)
    prompts = [set(score["means"]) for found in asked.values() for score in found["scores"]]
    assert prompts[::2] == [prompts[0]] * 3, "the same prompts each time"
    assert {len(each) for each in prompts} == {PROMPTS}
    assert [found["policy_version"] for found in asked.values()] == [0, 2, 3]
    rows = timeless_rows(evaluated)
    assert [row["step"] for row in rows if "eval_addition_mean" in row] == [2, 3]
    assert rows[1]["eval_addition_mean"] == asked[2]["scores"][0]["average"]["mean"]
    assert rows[1]["eval_multiplication_unscored"] == 0
    first, last = (found["scores"][0]["means"] for found in (asked[0], asked[3]))
    assert asked[3]["change"]["addition"]["mean"] == pytest.approx(
        sum(last[prompt] - first[prompt] for prompt in first) / PROMPTS
    )


def test_each_adapter_carries_its_run_and_its_scores(evaluated: Store) -> None:
    for step in (0, 1, 2, 3):
        adapter = open_adapter(f"{evaluated.uri}@step-{step}")
        averages = (
            {} if step == 1 else {each["environment"]: each["average"] for each in summary(evaluated, step)["scores"]}
        )
        told = {name: {each: score[each] for each in ("mean", "low", "high")} for name, score in averages.items()}
        assert (adapter.run, adapter.evaluation) == ("small", told)


def test_the_report_has_a_curve_of_each_environment(evaluated: Store) -> None:
    report = build_report(evaluated)
    curves = report.to_json()["evaluation"]
    assert {name: [point["step"] for point in points] for name, points in curves.items()} == {
        "addition": [0, 2, 3], "multiplication": [0, 2, 3]
    }  # fmt: skip
    page = render_html(report)
    assert "Evaluation: addition" in page
    assert "eval_addition_mean" in page
    assert re.search(rf"better on \d+ of {PROMPTS} prompts, worse on \d+", page), "both are told, and of how many"


def test_before_and_after_are_the_held_out_prompts_before_the_first_step_and_after_the_last(evaluated: Store) -> None:
    report = build_report(evaluated)
    both = report.sampled and report.sampled.before_after
    assert both is not None
    assert both.held_out
    assert both.compared == 2 * PROMPTS, "of each environment"
    assert all((pair.before.step, pair.after.step, pair.after.samples) == (0, 3, SAMPLES) for pair in both.pairs)
    first, last = (read_samples(evaluated, f"evaluation/step-{step:06d}/") for step in (0, 3))
    for pair in both.pairs:
        for side, samples in ((pair.before, first), (pair.after, last)):
            shown = side.shown
            rewards = [
                each.reward for each in samples
                if (each.environment, each.prompt_id) == (shown.environment, shown.prompt_id)
            ]  # fmt: skip
            assert side.mean == pytest.approx(sum(rewards) / len(rewards))


def test_a_rollout_is_kept_with_the_advantage_that_it_was_trained_with(evaluated: Store) -> None:
    """GRPO: the reward against the mean of its group, over the group's standard deviation (arXiv:2402.03300 eq. 3)."""
    report = build_report(evaluated)
    assert report.sampled is not None
    groups = [group for page in report.sampled.steps for group in page.groups]
    assert groups
    for group in groups:
        rewards, advantages = ([row[at] for row in group["rows"]] for at in (2, 3))
        deviation = statistics.stdev(rewards)
        expected = [
            (reward - statistics.fmean(rewards)) / (deviation + 1e-6) if deviation else 0.0 for reward in rewards
        ]
        assert advantages == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_orbit_eval_finds_the_same_scores_in_the_folder(
    max_staleness: int, evaluated: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = train(manifest(max_staleness=2), tmp_path / "run") if max_staleness else evaluated
    capsys.readouterr()
    assert run_command(["eval", store.uri, "--steps", "0,2,3", "--out", str(tmp_path / "eval"), "--json"]) == 0
    found = {(each["subject"], each["environment"]): each for each in json.loads(capsys.readouterr().out)["scores"]}
    for step in (0, 2, 3):
        for score in summary(store, step)["scores"]:
            later = found[f"step-{step}", score["environment"]]
            assert later["average"] == score["average"]
            assert later["completion_tokens"] == score["completion_tokens"], "the very same answers"


def test_a_stop_within_an_evaluation_keeps_what_was_answered(plain: Store, tmp_path: Path) -> None:
    asked: list[str] = []
    stop_at = PROMPTS * SAMPLES + 20

    def correct(completion: str, prompt: Any, fields: Mapping[str, str]) -> float:
        asked.append(completion)
        if len(asked) == stop_at:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        return float(completion == fields["answer"])

    made = manifest(concurrency=4)
    store = train(made, tmp_path / "run", {"correct": correct})
    assert build_report(store).status == "stopped"
    kept = {sample.key: sample for sample in read_samples(store, "evaluation/step-000000/")}
    assert PROMPTS * SAMPLES < len(kept) < 2 * PROMPTS * SAMPLES
    assert store.list("checkpoints") == []
    again = train(made, tmp_path / "run", {"correct": correct})
    assert build_report(again).status == "done"
    assert adapter_digests(again) == adapter_digests(plain)
    ended = {sample.key: sample for sample in read_samples(again, "evaluation/step-000000/")}
    assert {key: ended[key] for key in kept} == kept, "none of them was asked again"


@pytest.mark.long
def test_a_kill_within_an_evaluation_costs_nothing_that_was_durable(evaluated: Store, tmp_path: Path) -> None:
    launcher, out = RunLauncher(), tmp_path / "run"
    # One at a time, so that there is a middle to be killed in.
    made = manifest(concurrency=1)
    pid = launcher.start(made, str(out))
    folder = out / "evaluation" / "step-000002"
    until = time.monotonic() + 120
    while len(list(folder.glob("samples/*.zst"))) < 2 and time.monotonic() < until:
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    launcher.wait()
    store = open_store(str(out))
    kept = {sample.key: sample for sample in read_samples(store, "evaluation/step-000002/")}
    assert 0 < len(kept) < 2 * PROMPTS * SAMPLES
    assert not (folder / "summary.json").exists()
    assert launcher.run(made, str(out)) == 0
    launcher.close()
    ended = {sample.key: sample for sample in read_samples(store, "evaluation/step-000002/")}
    assert {key: ended[key] for key in kept} == kept, "with the time that each took"
    assert adapter_digests(store) == adapter_digests(evaluated)
    rows = [{name: row.get(name) for name in row if name.startswith("eval_")} for row in timeless_rows(store)]
    assert rows == [
        {name: row.get(name) for name in row if name.startswith("eval_")} for row in timeless_rows(evaluated)
    ]


def test_an_evaluation_may_come_to_a_run_that_is_done(plain: Store, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(plain.uri, out)
    store = train(manifest(samples=1), out)
    (only,) = [key for key in store.list("evaluation") if key.endswith("summary.json")]
    assert summary(store, STEPS)["scores"][0]["samples"] == PROMPTS
    assert only.endswith(f"step-{STEPS:06d}/summary.json")
    assert timeless_rows(store)[-1]["eval_addition_mean"] is not None
    assert adapter_digests(store) == adapter_digests(plain)


FOLDER = "evaluation/step-000005"
VALUES = (0.1, 0.9, 0.3, 0.5, 0.5, 0.4)
"""Means of evaluations in their order; that of step 1 is the highest."""


def peaking(made: dict[str, Any], out: Path) -> tuple[Store, list[str]]:
    """Trains with a reward by which evaluations have `VALUES`; also returns what the evaluations asked."""
    asked: list[str] = []

    def correct(completion: str, prompt: Any, fields: Mapping[str, str]) -> float:
        if "*" not in prompt[-1]["content"]:
            return float(completion == fields["answer"])
        asked.append(completion)
        return VALUES[(len(asked) - 1) // PROMPTS]

    return train(made, out, {"correct": correct}), asked


@pytest.mark.parametrize(
    ("stop", "steps", "why"),
    [
        ({"withoutGainSteps": 3}, 4, "held-out has not risen above 0.9 of step 1 for 3 steps (training.stopWhen)"),
        ({"evaluation": "held-out", "atLeast": 0.9}, 1, "held-out was 0.9 at step 1 (training.stopWhen.atLeast: 0.9)"),
    ],
)
def test_a_run_ends_when_its_evaluations_say_so_and_every_door_says_why(
    stop: dict[str, Any], steps: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    only = [{"name": "held-out", "prompts": [{"uri": "builtin://two-digit-multiplication"}]}]
    made = manifest(everySteps=1, samples=1, environments=only)
    made["spec"]["training"] |= {"steps": 5, "stopWhen": stop}
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "words"))
    store, asked = peaking(made, tmp_path / "run")
    report = build_report(store)
    assert (report.status, report.reason, report.to_json()["steps"]) == ("done", why, steps)
    assert f"done early: {why}, {steps} steps in" in format_result("converged", store.uri, report.to_json())
    assert why in (tmp_path / "run/report.html").read_text()
    assert json.loads((tmp_path / "words").read_text())["message"] == why
    capsys.readouterr()
    assert run_command(["report", store.uri]) == 0
    assert f"done: {why}" in capsys.readouterr().out

    assert len(asked) == PROMPTS * (steps + 1)
    for more in ({}, {"steps": 9}):
        made["spec"]["training"] |= more
        again, asked = peaking(made, tmp_path / "run")
        assert (asked, summary_of(build_report(again).to_json())["reason"]) == ([], why)
        assert build_report(again).to_json()["steps"] == steps


def kept_versions(store: Store) -> set[str]:
    return {key.split("/")[1] for key in store.list("adapters") if key.endswith("manifest.json")}


def test_the_best_adapter_is_kept_however_old_and_is_what_the_run_stands_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = [{"name": "held-out", "prompts": [{"uri": "builtin://two-digit-multiplication"}]}]
    made = manifest(everySteps=1, samples=1, environments=only)
    made["spec"]["training"]["steps"], made["spec"]["checkpoint"]["keep"] = 5, 2
    store, _ = peaking(made, tmp_path / "run")
    assert kept_versions(store) == {"policy-v1", "policy-v3", "policy-v4", "policy-v5"}
    assert adapter_address(store.uri) == adapter_address(f"{store.uri}@best")
    assert adapter_address(store.uri) == (
        f"{store.uri}/adapters/policy-v1", "the best of its run, held-out 0.900 at step 1"
    )  # fmt: skip
    facts = build_report(store).to_json()
    assert facts["best"] == {"step": 1, "evaluation": "held-out", "value": pytest.approx(0.9)}
    said = format_result("done", store.uri, facts)
    assert "best 0.900 at step 1, last 0.500 lower" in said
    assert f"best    {store.uri}/adapters/policy-v1" in said

    capsys.readouterr()
    assert run_command(["eval", f"{store.uri}@best", "--no-eval-base", "--out", str(tmp_path / "eval"), "--json"]) == 0
    told = capsys.readouterr()
    assert [each["subject"] for each in json.loads(told.out)["scores"]] == ["step-1"]
    assert "adapters/policy-v1 is the best of its run, held-out 0.900 at step 1" in told.err
    assert run_command(["inspect", f"{store.uri}@step-4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["policy_version"] == 4

    # As if an execution that was killed had evaluated another adapter of step 5, and it did better than any.
    found = summary(store, 5)
    found["scores"][0]["average"]["mean"] = 1.0
    for name, content in (("summary", found), ("evaluation", json.loads(store.get(f"{FOLDER}/evaluation.json")))):
        text = json.dumps(content).replace(found["adapter_digest"], "tree:another")
        (tmp_path / f"run/{FOLDER}/{name}.json").write_text(text)
    shutil.rmtree(tmp_path / "run/checkpoints/step-000005")
    again, asked = peaking(made, tmp_path / "run")
    assert len(asked) == PROMPTS, "of step 5 alone"
    assert summary(again, 5)["adapter_digest"] != "tree:another"
    assert kept_versions(again) == {"policy-v1", "policy-v3", "policy-v4", "policy-v5"}
    assert find_best(again)[0].step == 1
    made["spec"]["checkpoint"]["keepBest"] = {"count": 0}
    made["spec"]["training"]["steps"] = 6
    assert kept_versions(peaking(made, tmp_path / "run")[0]) == {"policy-v4", "policy-v5", "policy-v6"}


@pytest.mark.parametrize(
    ("kills", "steps"), [(2, 8), pytest.param(20, 60, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
def test_random_kills_leave_the_same_best(tmp_path: Path, launcher: RunLauncher, kills: int, steps: int) -> None:
    only = [{"name": "held-out", "prompts": [{"uri": "builtin://two-digit-addition"}]}]
    made = manifest(everySteps=1, samples=1, limit=8, environments=only)
    made["spec"]["training"]["steps"], made["spec"]["checkpoint"]["keep"] = steps, 2
    started = time.monotonic()
    assert launcher.run(made, str(tmp_path / "alone")) == 0
    undisturbed = time.monotonic() - started
    kill_until_done(launcher, made, str(tmp_path / "killed"), kills=kills, seed=kills, alone=undisturbed)
    alone, killed = (open_store(str(tmp_path / name)) for name in ("alone", "killed"))
    check_same_run(killed, alone, kills=kills, steps=steps)
    assert find_best(killed) == find_best(alone)
    assert kept_versions(killed) == kept_versions(alone)
    best, expected = (open_adapter(f"{each.uri}@best") for each in (killed, alone))
    assert (best.facts["digest"], best.evaluation) == (expected.facts["digest"], expected.evaluation)
