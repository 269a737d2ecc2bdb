"""`from orbit_runtime import run, load_manifest, Report`: in a script, in a thread, under an event loop; misused."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime import OrbitError, Report, load_manifest, run
from orbit_runtime.errors import DataError, ManifestError, OutputError, RewardsFailingError, UsageError
from orbit_runtime.spec import OrbitRun
from tests.integration.killing import small_manifest

pytestmark = pytest.mark.timeout(900)


def starts_with_one(completion: str, prompt: Any, fields: Any) -> float:
    return float(completion.startswith("1"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Two steps with a reward from Python."""
    out = tmp_path_factory.mktemp("api") / "run"
    return run(small_manifest(steps=2), out=out, rewards={"one": starts_with_one}, progress=False)


def test_a_report_has_the_numbers_of_the_folder(finished: Report) -> None:
    lines = (Path(finished.uri) / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert (finished.name, finished.status, finished.reason, finished.steps) == ("small", "done", None, 2)
    assert finished.curves["reward_mean"] == [row["reward_mean"] for row in rows]
    assert finished.curves["step"] == [1, 2]
    assert "adapter_digest" not in finished.curves
    assert [row["adapter_digest"] for row in finished.rows] == [row["adapter_digest"] for row in rows]
    assert finished.headline.last == rows[-1]["reward_mean"]
    assert finished.headline.change == rows[-1]["reward_mean"] - rows[0]["reward_mean"]
    assert json.loads(json.dumps(finished.to_dict())) == json.loads((Path(finished.uri) / "report.json").read_text())
    assert finished.adapter == f"{finished.uri}/adapters/policy-v2"
    assert (Path(finished.adapter) / "adapter_model.safetensors").exists()
    assert "small: done after 2 steps; reward first" in str(finished)
    assert finished._repr_html_().startswith("<p>small: done")


def test_samples_are_those_that_were_scored(finished: Report) -> None:
    assert finished.sampled_steps == [1, 2]
    samples = finished.samples(1)
    assert len(samples) == 16
    assert finished.samples() == finished.samples(2)
    for sample in samples:
        assert sample.reward == sample.parts["one"] == starts_with_one(sample.completion, None, None)
        assert sample.prompt.endswith("=")
        assert 0 < sample.num_tokens <= 4
        assert sum(map(int, sample.prompt.rstrip("=").split("+"))) == int(sample.expected)
    with pytest.raises(DataError, match="no samples are kept of step 7"):
        finished.samples(7)


def test_the_same_call_goes_on_and_an_edited_function_does_not(finished: Report) -> None:
    again = run(small_manifest(steps=2), out=finished.uri, rewards={"one": starts_with_one}, progress=False)
    assert again.rows == finished.rows
    edited: Callable[..., float] = lambda completion, prompt, fields: 0.5  # noqa: E731
    with pytest.raises(OutputError, match=r"content\.environment\.rewards\.one"):
        run(small_manifest(steps=3), out=finished.uri, rewards={"one": edited}, progress=False)
    with pytest.raises(OutputError):
        run(small_manifest(steps=3), out=finished.uri, progress=False)


def test_other_rewards_make_another_task(finished: Report, tmp_path: Path) -> None:
    other = run(small_manifest(steps=2), out=tmp_path / "run", progress=False)
    baseline, compared = finished.compare(other)
    assert (baseline.verdict, compared.verdict) == ("baseline", "not comparable")
    assert compared.reward == pytest.approx(sum(other.curves["reward_mean"]) / 2)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        finished.compare()


def test_under_an_event_loop_as_in_a_notebook(tmp_path: Path) -> None:
    manifest = small_manifest(steps=1)
    # A teacher is asked before the first step.
    first = run(manifest, out=tmp_path / "teacher", progress=False)
    teacher = {"type": "Adapter", "uri": first.adapter, "coefficient": 0.1, "preflight": "Report"}

    async def cell() -> Report:
        overrides = {"spec.algorithm.teacher": teacher}
        return run(manifest, out=tmp_path / "run", overrides=overrides, progress=False)

    report = asyncio.run(cell())
    assert report.status == "done"
    assert (tmp_path / "run" / "teacher.json").exists()


def test_an_interrupt_ends_it_after_the_step_and_the_same_call_goes_on(tmp_path: Path) -> None:
    asked = threading.Event()

    def interrupting(completion: str, prompt: Any, fields: Any) -> float:
        if not asked.is_set():
            asked.set()
            os.kill(os.getpid(), signal.SIGINT)
        return float(len(completion))

    def call() -> Report:
        return run(small_manifest(steps=3), out=tmp_path / "run", rewards={"long": interrupting}, progress=False)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        stopped = call()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert (stopped.status, stopped.steps < 3) == ("stopped", True)
    assert (call().status, call().steps) == ("done", 3)


def test_in_a_thread_that_is_not_the_main_one(tmp_path: Path) -> None:
    found: list[Report] = []
    thread = threading.Thread(
        target=lambda: found.append(run(small_manifest(steps=1), out=tmp_path / "run", progress=False))
    )
    thread.start()
    thread.join()
    assert found[0].status == "done"


def test_a_functions_fault_is_one_typed_error(tmp_path: Path) -> None:
    def broken(completion: str, prompt: Any, fields: Any) -> float:
        raise KeyError("column")

    with pytest.raises(RewardsFailingError, match="KeyError"):
        run(small_manifest(steps=1), out=tmp_path / "a", rewards={"broken": broken}, progress=False)
    with pytest.raises(ManifestError, match="cannot be called"):
        run(small_manifest(steps=1), out=tmp_path / "b", loss=lambda: None, progress=False)
    assert not (tmp_path / "b" / "run.json").exists()


def some_loss(inputs: Any, settings: Any) -> Any:
    return -inputs.logprobs_T


MISUSE: list[tuple[dict[str, Any], type[OrbitError], str]] = [
    ({"manifest": 3}, UsageError, "int is not a manifest"),
    ({"manifest": "nowhere.yaml"}, ManifestError, "there is no such file"),
    ({"overrides": {"spec.training.steps": -1}}, ManifestError, "steps"),
    ({"overrides": {"spec.training.steps": object()}}, UsageError, "cannot be part of a manifest"),
    ({"overrides": ["spec.training.steps=1"]}, UsageError, "list is not a mapping"),
    ({"rewards": {}}, UsageError, "no reward is given"),
    ({"rewards": {"one": 3}}, ManifestError, "one"),
    ({"rewards": {"not a name": starts_with_one}}, ManifestError, "not a name"),
    ({"rewards": {"one": asyncio.sleep}}, ManifestError, "async"),
    ({"prompts": []}, DataError, "there are no prompts"),
    ({"prompts": ["12+34="]}, DataError, r"prompts\[0\]: str is not a row"),
    ({"prompts": [{"prompt": {1, 2}}]}, DataError, r"prompts\[0\]: not plain values"),
    ({"prompts": [{"question": "12+34="}]}, DataError, r"prompts\[0\]: no key 'prompt'; the row has: 'question'"),
    ({"overrides": {"spec.algorithm": {"type": "SFT"}}, "loss": some_loss}, UsageError, "demonstrations"),
]


@pytest.mark.parametrize(("given", "kind", "said"), MISUSE)
def test_misuse_is_one_typed_error_and_leaves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], kind: type[OrbitError], said: str
) -> None:
    monkeypatch.setenv("ORBIT_CACHE", str(tmp_path / "cache"))
    arguments = {"manifest": small_manifest(steps=1), "out": tmp_path / "run", "progress": False, **given}
    with pytest.raises(kind, match=said):
        run(**arguments)
    assert not (tmp_path / "run" / "run.json").exists()


def test_what_the_call_brings_need_not_stand_in_the_mapping(tmp_path: Path) -> None:
    made = small_manifest(steps=1)
    del made["spec"]["data"], made["spec"]["environment"]
    rows = [{"prompt": f"{number}+34="} for number in range(10, 18)]
    report = run(made, out=tmp_path / "run", prompts=rows, rewards={"one": starts_with_one}, progress=False)
    assert {sample.prompt for sample in report.samples()} <= {row["prompt"] for row in rows}
    assert list(report.samples()[0].parts) == ["one"]
    with pytest.raises(ManifestError, match=r"spec\.data"):
        run(made, out=tmp_path / "other", rewards={"one": starts_with_one}, progress=False)


def test_a_report_of_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no run here"):
        Report(tmp_path)


def test_a_manifest_remembers_its_folder_and_can_be_changed(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "12+34=", "answer": "46"}\n')
    content = small_manifest(steps=1)
    content["spec"]["data"]["prompts"] = [{"uri": "rows.jsonl"}]
    (tmp_path / "run.yaml").write_text(json.dumps(content))
    manifest = load_manifest(tmp_path / "run.yaml")
    assert manifest.folder == tmp_path
    changed = load_manifest(manifest, {"spec.training.promptsPerStep": 1, "spec.training.miniBatchPrompts": 1})
    assert isinstance(changed, OrbitRun)
    assert (changed.folder, changed.spec.training.prompts_per_step) == (tmp_path, 1)
    assert changed.spec.model_fields_set == manifest.spec.model_fields_set, "defaults stay defaults"
    assert run(changed, out=tmp_path / "run", progress=False).samples()[0].prompt == "12+34="


def test_what_is_continued_elsewhere_says_that_a_function_is_missing(finished: Report, capsys: Any) -> None:
    from orbit_runtime.cli.main import run_command

    manifest = load_manifest(small_manifest(steps=2)).to_manifest()
    manifest["spec"]["environment"]["rewards"] = [{"name": "one", "entrypoint": "given:from_python"}]
    path = Path(finished.uri).parent / "again.yaml"
    path.write_text(json.dumps(manifest))
    assert run_command(["run", str(path), "--out", finished.uri]) == 64
    assert "given from Python" in " ".join("".join(capsys.readouterr()).split())
