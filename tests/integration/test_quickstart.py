"""The shipped manifests run, learn, prove every publish, and report what they did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orbit_runtime.cli.main import run_command
from orbit_runtime.model_info.builtin_models import builtin_folder

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    ("example", "steps", "gain"),
    [
        ("quickstart.yaml", 25, 0.25),
        pytest.param("quickstart-oft.yaml", 25, 0.08, marks=pytest.mark.long),
        pytest.param("ppo.yaml", 20, 0.1, marks=pytest.mark.long),
    ],
)
def test_an_example_learns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], example: str, steps: int, gain: float
) -> None:
    out = str(tmp_path / "run")
    argv = ["run", str(EXAMPLES / example), "--out", out, "--set", f"training.steps={steps}"]
    assert run_command(argv) == 0
    shown = capsys.readouterr().out
    assert "in the first" in shown
    assert "report.html" in shown
    assert run_command(["report", out, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["reward_last"] - report["reward_first"] >= gain
    assert report["publishes"] == report["publishes_proven"] == steps + 1
    assert report["base_digest_before"] == report["base_digest_after"]
    assert report["trainable_parameters"] > 0
    assert report["resumed"] == 0
    assert {"importing torch", "starting the engine", "first rollouts"} < set(report["start_seconds"])
    page = Path(out, "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert report["adapter_digest"][:20] in page
    if example == "quickstart.yaml":
        assert "Prompts of the evaluation: of 90, " in page, "before and after"
        curve = report["evaluation"]["held-out"]
        assert [point["step"] for point in curve] == [0, steps]
        assert curve[-1]["change"]["verdict"] == "better"
    assert page.count('"expected":"') >= 6, "what the prompt expects stands beside what was answered"


def test_the_wrong_precision_for_a_folder_is_the_manifests_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = builtin_folder("tiny-adder", "NVFP4")
    argv = ["run", str(EXAMPLES / "quickstart.yaml"), "--out", str(tmp_path / "run")]
    assert run_command([*argv, "--set", f"model.uri={folder}", "--set", "model.precision=MXFP4"]) == 64
    captured = capsys.readouterr()
    assert "the manifest says MXFP4, the checkpoint is NVFP4" in captured.out + captured.err
