"""Safetensors headers: what safetensors writes is read, and every kind of damage is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.errors import ModelError
from orbit_runtime.model_info.headers import parse_header, read_folder, read_header
from orbit_runtime.model_info.remote_checkpoint import store_headers
from orbit_runtime.storage import open_store


def file_of(entries: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


GOOD = {"a": entry("BF16", [2, 3], 0, 12), "b": entry("I32", [1], 12, 16)}


def test_names_dtypes_shapes_and_places() -> None:
    data = file_of({"__metadata__": {"format": "pt"}, **GOOD}, bytes(16))
    header = parse_header(data, size=len(data), where="m")
    assert (header.tensors["a"].dtype, header.tensors["a"].shape, header.tensors["a"].num_bytes) == ("BF16", (2, 3), 12)
    assert header.tensors["b"].start == 12
    assert header.metadata == {"format": "pt"}
    assert header.data_start == len(data) - 16


def test_a_file_written_by_safetensors_is_read(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    from safetensors.numpy import save_file

    save_file({"w": numpy.zeros((3, 5), numpy.float32)}, tmp_path / "model.safetensors")
    assert read_header(tmp_path / "model.safetensors").tensors["w"].shape == (3, 5)
    assert list(read_folder(tmp_path)) == ["w"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"abc", "too few"),
        (file_of(GOOD, bytes(16))[:30], "the header claims"),
        (file_of(GOOD, bytes(15)), "need 16 bytes of data, the file has 15"),
        (file_of(GOOD, bytes(17)), "the file has 17"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "the header claims"),
        ((2).to_bytes(8, "little") + b"{]", "does not parse"),
        ((2).to_bytes(8, "little") + b"[]", "does not parse"),
        (file_of({"a": entry("BF16", [2, 3], 0, 10)}, bytes(10)), "does not fill"),
        (file_of({"a": entry("BF16", [-2, -3], 0, 12)}, bytes(12)), "whole numbers"),
        (file_of({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, bytes(6)), "do not follow"),
        (file_of({"a": {"dtype": "U8"}}), "does not parse"),
        (file_of({"a": entry("U7", [4], 0, 4)}, bytes(4)), "there is no dtype 'U7'"),
        (file_of({"a": entry("U8", [4, True], 0, 4)}, bytes(4)), "whole numbers"),
        (file_of({"__metadata__": 5}), "does not parse"),
        ((600000).to_bytes(8, "little") + b'{"a":' * 120000, "does not parse"),
        ((19).to_bytes(8, "little") + b'{"a": 1, "a": 2}   ', "occurs twice"),
    ],
)
def test_damage_is_named_with_the_file(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=message) as caught:
        read_header(path)
    assert caught.value.where == str(path)
    assert caught.value.exit_code == 66


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    (tmp_path / "1.safetensors").write_bytes(file_of({"a": entry("U8", [4], 0, 4)}, bytes(4)))
    (tmp_path / "2.safetensors").write_bytes(file_of({"b": entry("U8", [4], 0, 4)}, bytes(4)))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    assert {name: path.name for name, (path, _) in read_folder(tmp_path).items()} == {
        "a": "1.safetensors",
        "b": "2.safetensors",
    }
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "1.safetensors"}}))
    with pytest.raises(ModelError, match="lists b"):
        read_folder(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "3.safetensors"}}))
    with pytest.raises(ModelError, match=r"1 of 2 shards are missing: 3\.safetensors"):
        read_folder(tmp_path)
    index.write_text("{")
    with pytest.raises(ModelError, match=r"index\.json:1: not JSON"):
        read_folder(tmp_path)


def test_an_index_beside_a_whole_file_is_stale_or_refused(tmp_path: Path) -> None:
    data = file_of({"a": entry("U8", [4], 0, 4)}, bytes(4))
    (tmp_path / "model.safetensors").write_bytes(data)
    index = tmp_path / "model.safetensors.index.json"
    for file in ("model.safetensors", "1.safetensors"):
        index.write_text(json.dumps({"weight_map": {"a": file}}))
        assert {name: path.name for name, (path, _) in read_folder(tmp_path).items()} == {"a": "model.safetensors"}
        (tmp_path / "config.json").write_text("{}")
        far = store_headers(open_store(str(tmp_path)))
        assert {name: str(place) for name, (place, _) in far.tensors.items()} == {"a": "model.safetensors"}
    (tmp_path / "1.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match="transformers reads the first"):
        store_headers(open_store(str(tmp_path)))
    with pytest.raises(ModelError, match="transformers reads the first") as caught:
        read_folder(tmp_path)
    assert (caught.value.exit_code, "delete" in str(caught.value.fix)) == (66, True)


def test_a_compiled_models_names_are_those_of_the_model(tmp_path: Path) -> None:
    stored = "model._orig_mod.layers.0._orig_mod.mlp.up_proj.weight"
    (tmp_path / "model.safetensors").write_bytes(file_of({stored: entry("U8", [4], 0, 4)}, bytes(4)))
    ((name, (_, info)),) = read_folder(tmp_path).items()
    assert (name, info.stored_as) == ("model.layers.0.mlp.up_proj.weight", stored)


def test_a_folder_without_weights_or_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds neither"):
        read_folder(tmp_path)
    with pytest.raises(ModelError, match="does not exist"):
        read_folder(tmp_path / "absent")
    with pytest.raises(ModelError, match="does not exist"):
        read_header(tmp_path / "absent.safetensors")
