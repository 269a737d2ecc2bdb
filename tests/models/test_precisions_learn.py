"""The shipped model learns in every precision that it is shipped in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orbit_runtime.cli.main import run_command

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_shipped_precision_learns_and_one_report_compares_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first 14 steps of the 60 whose figures docs/reference/formats.md has: by then INT4 gains 0.18."""
    precisions = ("INT4", "FP8", "NVFP4", "MXFP4")
    runs = [str(tmp_path / precision) for precision in precisions]
    for precision, out in zip(precisions, runs, strict=True):
        argv = ["run", str(EXAMPLES / "quickstart.yaml"), "--out", out, "--set", f"model.precision={precision}"]
        assert run_command([*argv, "--set", "training.steps=14"]) == 0
        capsys.readouterr()
        assert run_command(["report", out, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["reward_last"] - report["reward_first"] >= 0.12
        assert report["publishes"] == report["publishes_proven"] == 15
        assert report["base_digest_before"] == report["base_digest_after"]
    assert run_command(["report", *runs, "--json"]) == 0
    baseline, *others = json.loads(capsys.readouterr().out)["runs"]
    assert [Path(each["uri"]).name for each in (baseline, *others)] == list(precisions)
    assert baseline["margin"] is None
    assert all(each["margin"] > 0 and abs(each["difference"]) <= 2 * each["margin"] for each in others)
