"""Supervised fine-tuning: the loss of another implementation, kills that change nothing, and the adapter handed on."""

from __future__ import annotations

import copy
import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoTokenizer

from orbit_runtime.cli.main import run_command
from orbit_runtime.errors import DataError, ModelError, StoppedOnRequest
from orbit_runtime.loop import run
from orbit_runtime.loop.keep import Checkpoints
from orbit_runtime.loop.replay import replay
from orbit_runtime.loop.state import RunState
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.observability.charts import held_out_chart
from orbit_runtime.observability.metrics import parse_row
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.observability.report import build_report
from orbit_runtime.observability.report_html import render_html
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage import open_store
from tests.integration.killing import kill_until_done, small_manifest, timeless_rows
from tests.integration.run_launcher import RunLauncher
from tests.integration.tiny_models import load_reference

RATE = 2e-3


def sft_manifest(*, steps: int, every_steps: int = 10, precision: str = "INT4", **data: Any) -> dict[str, Any]:
    manifest = small_manifest(steps=steps, every_steps=every_steps)
    spec = manifest["spec"]
    spec["model"]["precision"] = precision
    spec["algorithm"] = {"type": "SFT"}
    spec["data"] = {"prompts": [{"uri": "builtin://two-digit-addition", "completionField": "answer"}], **data}
    spec["training"] = {"steps": steps, "promptsPerStep": 16, "learningRate": RATE}
    del spec["environment"]
    return manifest


def trained(manifest: dict[str, Any], out: Path) -> dict[str, Any]:
    return dict(run(OrbitRun.model_validate(manifest), out=str(out), progress=SilentProgress()).report)


def rows(out: Path) -> list[Any]:
    return [parse_row(line) for line in (out / "metrics.jsonl").read_bytes().splitlines()]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of an adapter on the INT4 base, with demonstrations held out."""
    out = tmp_path_factory.mktemp("sft")
    trained(sft_manifest(steps=40, validation={"share": 0.02, "everySteps": 10}), out)
    return out


def with_initial(manifest: dict[str, Any], uri: Path | str) -> dict[str, Any]:
    changed = copy.deepcopy(manifest)
    changed["spec"]["adapter"]["initFrom"] = str(uri)
    return changed


def test_three_steps_cost_what_transformers_and_peft_say(tmp_path: Path) -> None:
    """From an adapter that is not the identity, in the file's order: loss and gradient of every step."""
    trained(sft_manifest(steps=3, precision="BF16"), tmp_path / "first")
    folder = tmp_path / "first" / "adapters" / "policy-v3"
    manifest = with_initial(sft_manifest(steps=3, precision="BF16", shuffle=False), folder)
    trained(manifest, tmp_path / "ours")

    base = builtin_folder("tiny-adder", "BF16")
    model = PeftModel.from_pretrained(load_reference(base), str(folder), is_trainable=True)
    tokenizer = AutoTokenizer.from_pretrained(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    lines = (Path("orbit_runtime/data/builtin/two-digit-addition.jsonl")).read_text().splitlines()
    for step, row in enumerate(rows(tmp_path / "ours")):
        total, count = torch.zeros(()), 0
        for line in lines[16 * step : 16 * (step + 1)]:
            asked = json.loads(line)
            before = tokenizer(f"<|user|>{asked['prompt']}<|im_end|><|assistant|>", add_special_tokens=False).input_ids
            answer = tokenizer(f"{asked['answer']}<|im_end|>", add_special_tokens=False).input_ids
            labels = torch.tensor([[-100] * len(before) + answer])
            # transformers' own loss is a mean over the labels of its call.
            total = total + model(torch.tensor([before + answer]), labels=labels).loss * len(answer)
            count += len(answer)
        loss = total / count
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert row.number("tokens") == count
        # After an update our passes multiply by the adapter as it would be published, in BF16.
        within = 1e-5 if step == 0 else 5e-3
        assert row.number("loss") == pytest.approx(float(loss), rel=within)
        assert row.number("grad_norm") == pytest.approx(float(norm), rel=10 * within)

    told = json.loads((tmp_path / "ours" / "answers.json").read_text())["answers"]
    assert [each["expected"] for each in told] == [json.loads(line)["answer"] for line in lines[:3]]
    for each, line in zip(told, lines, strict=False):
        ids = tokenizer(f"<|user|>{json.loads(line)['prompt']}<|im_end|><|assistant|>", return_tensors="pt").input_ids
        likeliest = partial(model.generate, ids, do_sample=False, max_new_tokens=32)
        after = likeliest()
        with model.disable_adapter():
            base = likeliest()
        said = [tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True) for made in (base, after)]
        assert [each["base"], each["after"]] == said


def test_what_was_held_out_gets_cheaper_and_the_newest_adapter_is_the_best(learned: Path) -> None:
    measured = [row.number("validation_loss") for row in rows(learned) if row.number("validation_loss") is not None]
    report = json.loads((learned / "report.json").read_text())
    assert report["headline"]["name"] == "held-out loss"
    assert report["headline"]["last"] == min(measured) < 0.6 * report["headline"]["first"]
    versions = sorted(int(each.name.removeprefix("policy-v")) for each in (learned / "adapters").iterdir())
    best = 10 * (measured.index(min(measured)) + 1)
    assert versions[-1] == best == report["policy_version"]
    assert report["base_digest_before"] == report["base_digest_after"]
    assert report["publishes"] == 0, "no engine ran, and none is claimed to hold it"
    found = build_report(open_store(str(learned), writable=False))
    (chart,) = held_out_chart(found.rows, report["headline"]["first"])
    assert [len(series.values) for series in chart.legend] == [1 + len(measured)]
    page = render_html(found)
    assert chart.title in page
    told = json.loads((learned / "answers.json").read_text())["answers"]
    assert len(told) == 3
    assert all(f'<div class="said">{escape(each["after"])}</div>' in page for each in told)
    assert "held-out prompts" in page


@pytest.mark.parametrize("as_patience", [True, False])
def test_it_ends_early_where_it_gets_no_better_and_stays_ended(as_patience: bool, tmp_path: Path) -> None:
    # It ends at a step that has a checkpoint already.
    manifest = sft_manifest(steps=200, every_steps=1, validation={"share": 0.01, "everySteps": 2})
    if as_patience:
        manifest["spec"]["data"]["validation"]["patience"] = 2
    else:
        manifest["spec"]["training"]["stopWhen"] = {"evaluation": "held-out", "withoutGainSteps": 3}
    # So large that it unlearns.
    manifest["spec"]["training"]["learningRate"] = 0.5
    manifest["spec"]["data"]["limit"] = 400
    result = run(OrbitRun.model_validate(manifest), out=str(tmp_path / "run"), progress=SilentProgress())
    assert result.ended == "converged"
    report = result.report
    assert report["steps"] < 200
    assert report["base_digest_after"] == report["base_digest_before"]
    summary = json.loads((tmp_path / f"run/checkpoints/step-{report['steps']:06d}/manifest.json").read_text())
    best = summary["facts"]["summary"]["validated"]
    assert report["steps"] == best["best_step"] + 4
    assert report["reason"] == (
        f"the held-out loss has not fallen below {best['best']:.4g} of step {best['best_step']} for 4 steps "
        "(training.stopWhen)"
    )
    again = run(OrbitRun.model_validate(manifest), out=str(tmp_path / "run"), progress=SilentProgress())
    assert (again.ended, again.report["steps"], again.report["reason"]) == (
        "converged", report["steps"], report["reason"]
    )  # fmt: skip


def test_it_ends_as_soon_as_the_loss_is_low_enough(tmp_path: Path) -> None:
    manifest = sft_manifest(steps=40, validation={"share": 0.02, "everySteps": 5})
    manifest["spec"]["training"]["stopWhen"] = {"atLeast": -100}
    report = trained(manifest, tmp_path)
    assert (report["steps"], report["status"]) == (0, "done")
    assert "at step 0 (training.stopWhen.atLeast: -100)" in report["reason"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_kills_change_no_bit(tmp_path: Path, launcher: RunLauncher) -> None:
    manifest = sft_manifest(steps=160, every_steps=5, validation={"share": 0.02, "everySteps": 8})
    started = time.monotonic()
    assert launcher.run(manifest, str(tmp_path / "alone")) == 0
    undisturbed = time.monotonic() - started
    kill_until_done(launcher, manifest, str(tmp_path / "killed"), kills=3, seed=1, alone=undisturbed)
    killed, alone = (open_store(str(tmp_path / name)) for name in ("killed", "alone"))
    assert timeless_rows(killed) == timeless_rows(alone)
    reports = [json.loads(store.get("report.json")) for store in (killed, alone)]
    assert len({each["adapter_digest"] for each in reports}) == 1
    assert reports[0]["headline"] == reports[1]["headline"]
    assert reports[0]["resumed"] >= 1


def test_no_step_that_a_resume_continues_from_is_without_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, seen = Checkpoints.begin, []

    def watched(checkpoints: Checkpoints, state: RunState, *rest: Any) -> None:
        seen.append((state.step, len([*checkpoints.store.list("metrics/")])))
        begin(checkpoints, state, *rest)

    monkeypatch.setattr(Checkpoints, "begin", watched)
    trained(sft_manifest(steps=7, every_steps=3), tmp_path / "run")
    assert seen == [(3, 3), (6, 6), (7, 7)]


def test_a_request_to_stop_is_heard_while_demonstrations_are_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any, tell: Callable[[int, int], None], **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        tell(256, 512)

    monkeypatch.setattr("orbit_runtime.loop.sft.encode_demonstrations", stopped)
    with pytest.raises(StoppedOnRequest, match="while demonstrations were tokenised"):
        trained(sft_manifest(steps=1), tmp_path / "run")


def test_orbit_sft_is_sft_whatever_is_set(tmp_path: Path, launcher: RunLauncher) -> None:
    (tmp_path / "run.json").write_text(json.dumps(sft_manifest(steps=1)))
    command = ["sft", str(tmp_path / "run.json"), "--set", "algorithm.type=GRPO", "--out", str(tmp_path / "run")]
    pid = launcher.command(*command)
    while (code := launcher.ended(pid)) is None:
        time.sleep(0.02)
    assert code == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["resolved"]["spec"]["algorithm"]["type"] == "SFT"


def test_a_script_reads_the_losses_of_a_run_from_its_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text(json.dumps(sft_manifest(steps=2, validation={"share": 0.01})))
    assert run_command(["sft", str(tmp_path / "run.json"), "--json", "--out", str(tmp_path / "run")]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (result["event"], result["ended"]) == ("result", "done")
    assert result["headline"] == report["headline"]
    assert result["headline"]["name"] == "held-out loss"
    assert result["headline"]["first"] > result["headline"]["last"] > 0
    assert result["policy_version"] == 2


def test_a_run_of_rewards_begins_where_the_demonstrations_ended(tmp_path: Path, learned: Path) -> None:
    manifest = with_initial(small_manifest(steps=2), learned)
    manifest["spec"]["training"] |= {"promptsPerStep": 32}
    report = trained(manifest, tmp_path / "run")
    base = trained(small_manifest(steps=1), tmp_path / "base")
    assert report["reward_first"] > base["reward_first"] + 0.2
    assert report["publishes"] == report["publishes_proven"] == 3
    newest = json.loads((learned / "report.json").read_text())["policy_version"]
    given = (learned / "adapters" / f"policy-v{newest}" / "adapter_model.safetensors").read_bytes()
    assert (tmp_path / "run" / "adapters" / "policy-v0" / "adapter_model.safetensors").read_bytes() == given
    assert replay(open_store(str(tmp_path / "run")), steps=None, show=lambda *_: None).is_equal


@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        pytest.param("tiny-adder", {"type": "OFT", "oft": {"blockSize": 16}}, marks=pytest.mark.long),
        ("tiny-moe-adder", {"type": "LoRA", "experts": "PerExpert"}),
    ],
    ids=["OFT", "experts"],
)
def test_rotations_and_experts_are_handed_on_too(tmp_path: Path, model: str, adapter: dict[str, Any]) -> None:
    demonstrated, rewarded = sft_manifest(steps=6), small_manifest(steps=2)
    for manifest in (demonstrated, rewarded):
        manifest["spec"]["model"]["uri"] = f"builtin://{model}"
        manifest["spec"]["adapter"] = adapter
    before = trained(demonstrated, tmp_path / "sft")
    report = trained(with_initial(rewarded, tmp_path / "sft"), tmp_path / "run")
    assert report["publishes"] == report["publishes_proven"] == 3
    assert before["policy_version"] == 6
    given, taken = tmp_path / "sft" / "adapters" / "policy-v6", tmp_path / "run" / "adapters" / "policy-v0"
    file = "adapter_model.safetensors"
    assert (taken / file).read_bytes() == (given / file).read_bytes()
    assert replay(open_store(str(tmp_path / "run")), steps=None, show=lambda *_: None).is_equal


def test_a_run_goes_on_when_what_it_began_with_is_gone(tmp_path: Path, learned: Path) -> None:
    source = tmp_path / "source"
    newest = json.loads((learned / "report.json").read_text())["policy_version"]
    source.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "manifest.json"):
        (source / name).write_bytes((learned / "adapters" / f"policy-v{newest}" / name).read_bytes())
    manifest = with_initial(small_manifest(steps=2), source)
    trained(manifest, tmp_path / "run")
    for file in source.iterdir():
        file.unlink()
    manifest["spec"]["training"]["steps"] = 3
    assert trained(manifest, tmp_path / "run")["steps"] == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": {"uri": "builtin://tiny-adder", "precision": "NVFP4"}}, "was trained on another base"),
        ({"adapter": {"type": "LoRA", "lora": {"rank": 8}}}, "lora.rank 16, this run's is 8"),
        ({"adapter": {"type": "LoRA", "lora": {"alpha": 16}}}, "scaling 2.0, this run's is 1.0"),
        ({"adapter": {"type": "OFT"}}, "type LoRA, this run's is OFT"),
        ({"adapter": {"type": "LoRA", "targets": ["q_proj"]}}, "which this run's adapter does not"),
    ],
)
def test_an_adapter_of_another_kind_or_base_is_refused(
    tmp_path: Path, learned: Path, change: dict[str, Any], says: str
) -> None:
    manifest = small_manifest(steps=1)
    manifest["spec"] |= change
    with pytest.raises(ModelError, match=says):
        trained(with_initial(manifest, learned), tmp_path / "run")
    assert not (tmp_path / "run" / "run.json").exists()


def test_an_adapter_of_another_shape_is_refused(tmp_path: Path, learned: Path) -> None:
    """The adapter's base was not recorded: PEFT's own folder, of another model."""
    folder = tmp_path / "other"
    folder.mkdir()
    newest = json.loads((learned / "report.json").read_text())["policy_version"]
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_bytes((learned / "adapters" / f"policy-v{newest}" / name).read_bytes())
    manifest = small_manifest(steps=1)
    manifest["spec"]["model"] = {"uri": "builtin://tiny-qwen3", "precision": "BF16"}
    with pytest.raises(ModelError, match="28 tensors cannot be used"):
        trained(with_initial(manifest, folder), tmp_path / "run")


def test_there_must_be_an_adapter_to_begin_with(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="there is no adapter here"):
        trained(with_initial(small_manifest(steps=1), tmp_path / "empty"), tmp_path / "run")


def test_a_broken_row_leaves_nothing_that_looks_like_a_run(tmp_path: Path) -> None:
    manifest = sft_manifest(steps=1)
    manifest["spec"]["data"]["prompts"][0]["completionField"] = "solution"
    with pytest.raises(DataError, match="the column 'solution' holds no answer"):
        trained(manifest, tmp_path / "run")
    assert not (tmp_path / "run" / "run.json").exists()
