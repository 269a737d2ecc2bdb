"""When a step's row is written, and what its clock holds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.loop import run
from orbit_runtime.loop.keep import MAX_REFERENCE, build_references
from orbit_runtime.observability.metrics import STAGES, MetricsRow
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.spec import OrbitRun
from orbit_runtime.types import Group, Prompt
from tests.integration.killing import small_manifest

SLOW = 1.0
"""Seconds, far above what a checkpoint of the small run takes."""


class SlowThirdCheckpoint(SilentProgress):
    """Lets the checkpoint of step 3 take a second, and reads the folder when the step after it starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shown: list[MetricsRow] = []
        self.provisional: dict[str, Any] = {}
        self.checkpoints = 0

    def stage(self, name: str) -> None:
        if name == "checkpoint":
            self.checkpoints += 1
            # It is waited for in the step after it, and in the first there is none to wait for.
            if self.checkpoints == 4:
                time.sleep(SLOW)
                self.provisional = json.loads((self.folder / "metrics" / "step-000003.json").read_text())

    def step(self, row: MetricsRow) -> None:
        self.shown.append(row)


def test_a_row_holds_what_its_own_checkpoint_took(tmp_path: Path) -> None:
    progress = SlowThirdCheckpoint(tmp_path)
    run(OrbitRun.model_validate(small_manifest(steps=5)), out=str(tmp_path), progress=progress)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["seconds_checkpoint"] >= SLOW] == [3]
    assert all(row["seconds_checkpoint"] > 0 for row in rows), "the last step's too, which is kept after the loop"
    for row in rows:
        stages = sum(row[f"seconds_{stage}"] or 0 for stage in STAGES)
        assert stages <= row["seconds_total"] <= stages + SLOW / 2
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds_total"])
    shown = [json.loads(row.to_json()) for row in progress.shown]
    later = ("seconds_checkpoint", "seconds_total", "tokens_per_second")
    for early, kept in zip(shown, rows, strict=True):
        # Its checkpoint is written beside the next step: what that one waits for it comes on top.
        assert {name: value for name, value in early.items() if kept[name] != value}.keys() <= {*later}
        assert early["seconds_checkpoint"] <= kept["seconds_checkpoint"]
    early = progress.provisional
    assert early["seconds_checkpoint"] is None
    assert early["seconds_total"] + SLOW <= rows[2]["seconds_total"]
    assert {name: value for name, value in early.items() if rows[2][name] != value}.keys() == {
        "seconds_checkpoint",
        "seconds_total",
        "tokens_per_second",
    }


def test_what_a_prompt_expects_is_text_short_and_only_where_its_row_says_it() -> None:
    rows: dict[str, dict[str, Any]] = {
        "p/0": {"answer": "46"},
        "p/1": {"answer": 46, "unit": "é"},
        "p/2": {"answer": {"value": [1, 2]}},
        "p/3": {"answer": None},
        "p/4": {},
        "p/5": {"answer": "x" * 3000},
    }
    groups = [Group(Prompt(name, 0, (), fields), ()) for name, fields in rows.items()]
    assert build_references(groups, ("answer", "unit")) == {
        "p/0": "46",
        "p/1": "46\né",
        "p/2": '{"value": [1, 2]}',
        "p/5": "x" * MAX_REFERENCE,
    }
