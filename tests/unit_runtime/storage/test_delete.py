"""Deleting a run folder: all of it, nothing else, and again where it was cut short."""

from __future__ import annotations

from pathlib import Path

import pytest

from orbit_runtime.errors import OutputError
from orbit_runtime.storage import claim_execution, open_store
from orbit_runtime.storage.delete import delete_run, main


def test_a_run_folder_goes_away_whole_and_its_neighbour_stays(tmp_path: Path) -> None:
    run, other = open_store(str(tmp_path / "runs" / "adder")), open_store(str(tmp_path / "runs" / "adder-2"))
    for store in (run, other):
        claim_execution(store, run_name="x").release("done")
        store.put("run.json", b"{}")
        store.put("checkpoints/step-000001/part", b"x" * 10)
    assert main([run.uri]) == 0
    assert run.list() == []
    assert len(other.list()) >= 3
    assert main([run.uri]) == 0


def test_what_was_left_by_a_first_try_is_still_recognised(tmp_path: Path) -> None:
    run = open_store(str(tmp_path / "adder"))
    run.put("run.json", b"{}")
    assert delete_run(run) == 1
    assert delete_run(run) == 0


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    data = open_store(str(tmp_path))
    data.put("precious.txt", b"x")
    with pytest.raises(OutputError, match="not a run folder"):
        delete_run(data)
    assert main([str(tmp_path)]) == 73
    assert data.list() == ["precious.txt"]


def test_without_a_uri_nothing_happens() -> None:
    assert main([]) == 64
