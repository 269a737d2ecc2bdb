"""The commands of `docs/guides/data.md`, as a reader would give them."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from fakes.guide import ROOT, commands, run_in_process, write_files

from orbit_runtime.data.records import decompress_rollouts

GUIDE = (ROOT / "docs/guides/data.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.timeout(300)


def test_a_run_reads_the_folder_that_datasets_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quickstart.yaml").write_text((ROOT / "examples/quickstart.yaml").read_text())
    write_files(GUIDE, tmp_path)
    monkeypatch.chdir(tmp_path)
    (text,) = commands(GUIDE, "Files")
    save, run = text.split("\n", 1)
    assert save == "python save.py"
    runpy.run_path("save.py")
    run_in_process(run.replace("\\\n", ""), tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "runs/quickstart/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    (first, *_) = decompress_rollouts((tmp_path / "runs/quickstart/rollouts/step-000001.jsonl.zst").read_bytes())
    assert first.prompt_id.startswith("sums/")
