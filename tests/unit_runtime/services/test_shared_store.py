"""A side of a run in three processes, and the store that it shares with the orchestrator."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from orbit_runtime.errors import StorageError
from orbit_runtime.services.shared_store import SharedStore, try_to_share
from orbit_runtime.storage import claim_execution, open_store


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_side_writes_into_no_folder_that_was_taken_away(tmp_path: Path, is_replaced: bool) -> None:
    folder = tmp_path / "run"
    ours, depot = open_store(str(folder)), SharedStore()
    execution = claim_execution(ours, run_name="r")
    assert try_to_share(lambda _, *given: depot.share(*given), ours, execution.number)
    depot.store.put("checkpoints/a", b"1")
    shutil.move(folder, tmp_path / "elsewhere")
    if is_replaced:
        folder.mkdir()
    with pytest.raises(StorageError, match="removed, moved or replaced") as caught:
        depot.store.put("checkpoints/b", b"1")
    assert caught.value.exit_code == 74
    assert folder.exists() == is_replaced
    assert not list(folder.rglob("*"))
    execution.release("failed")
