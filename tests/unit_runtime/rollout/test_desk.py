"""Where adapters lie for servers: written when a server asks for files, verified if they come from a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from orbit_runtime.adapters.patience import adapter_bytes
from orbit_runtime.digests import hash_pieces
from orbit_runtime.errors import GateError
from orbit_runtime.rollout.desk import EXPLAIN_FILE, FolderDesk
from orbit_runtime.storage import Part, Stored, open_store
from orbit_runtime.types import AdapterFiles

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(200))}


def stored(folder: Path) -> AdapterFiles:
    store, pieces = open_store(str(folder)), {name: hash_pieces([data]) for name, data in FILES.items()}
    for name, data in FILES.items():
        store.put(f"adapters/policy-v1/{name}", data)
    parts = {name: Part(f"adapters/policy-v1/{name}", each) for name, each in pieces.items()}
    return AdapterFiles(1, Stored(store, parts), "tree:1", pieces)


def read(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir()}


def test_files_are_written_once_a_server_asks_and_are_gone_when_it_is_dropped(tmp_path: Path) -> None:
    desk = FolderDesk(tmp_path / "desk")
    desk.take("policy-v1", AdapterFiles(1, FILES, "tree:1"))
    assert read(desk.home("policy-v1")) == {}
    folder = desk.files("policy-v1")
    assert read(folder) == FILES
    assert desk.files("policy-v1") == folder
    with desk.explaining("policy-v1") as places:
        assert list(places) == [folder]
        assert read(folder) == {**FILES, EXPLAIN_FILE: b""}
    assert read(folder) == FILES
    with desk.carry("policy-v1", {}) as handover:
        assert handover is None
    desk.drop("policy-v1")
    assert not folder.exists()
    assert desk.names() == ()


def test_a_file_that_was_changed_in_the_store_is_not_handed_over(tmp_path: Path) -> None:
    adapter, desk = stored(tmp_path / "run"), FolderDesk(tmp_path / "desk")
    assert adapter_bytes(adapter) == sum(map(len, FILES.values()))
    desk.take("policy-v1", adapter)
    key = "adapters/policy-v1/adapter_model.safetensors"
    open_store(str(tmp_path / "run")).put(key, bytes(200))
    with pytest.raises(GateError, match=f"{key} is not what the trainer wrote there"):
        desk.files("policy-v1")
    open_store(str(tmp_path / "run")).put(key, FILES["adapter_model.safetensors"])
    assert read(desk.files("policy-v1")) == FILES
