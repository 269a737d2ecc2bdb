"""A run that an earlier version began goes on; `make same-behaviour` compares where it arrives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.cli.main import run_command

EARLIER = Path(__file__).parents[1] / "data" / "earlier_run"
STEPS_DONE = 3


def holds(before: Any, after: Any) -> bool:
    """Whether `after` says what `before` says, and maybe more."""
    if isinstance(before, dict):
        return isinstance(after, dict) and all(name in after and holds(before[name], after[name]) for name in before)
    return bool(before == after)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copied = tmp_path_factory.mktemp("earlier") / "half-way"
    return Path(shutil.copytree(EARLIER, copied))


@pytest.mark.timeout(300)
def test_a_run_of_an_earlier_version_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "run"
    before = {name: (out / name).read_bytes() for name in ("run.json", "metrics.jsonl")}
    assert run_command(["run", str(folder / "run.yaml"), "--out", str(out)]) == 0
    told = capsys.readouterr()
    notes = [line.partition(" ")[2] for line in told.err.splitlines()]
    assert f"continuing after step 3 of {out}" in notes
    assert "resumed after step 3 of 6" in notes
    assert told.out.startswith("half-way: done, 6 steps in ")
    assert "publishes proven 8 of 8\n" in told.out

    rows = (out / "metrics.jsonl").read_bytes().splitlines()
    assert rows[:STEPS_DONE] == before["metrics.jsonl"].splitlines(), "rows of finished steps stay as they are"
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    report = json.loads((out / "report.json").read_text())
    assert (report["status"], report["steps"], report["resumed"], report["executions"]) == ("done", 6, 1, 2)
    assert [each["step"] for each in report["evaluation"]["held-out"]] == [0, 2, 4, 6]
    assert report["base_digest_after"] == report["base_digest_before"]

    first, now = json.loads(before["run.json"]), json.loads((out / "run.json").read_text())
    changing = {"execution", "rounding", "versions"}
    assert holds({name: first[name] for name in first.keys() - changing}, now), "what the first start decided holds"
    assert now["rounding"][: len(first["rounding"])] == first["rounding"]
