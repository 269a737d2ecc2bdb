"""The digest of a model's weights: whose it is, and when its files are not read again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from fakes.deepseek_v4_folder import write_deepseek_v4

from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.model_info.content import cached_weights_digest, file_digests, weights_digest
from orbit_runtime.model_info.settings import TEMPLATES, own_template
from orbit_runtime.storage.cache import Cache


class Reader:
    """Counts how often the files are read, later than they were made."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache, self.reads, self.now = folder, Cache(cache), 0, 0.0
        self.settle()

    def settle(self) -> None:
        self.now = max(path.stat().st_ctime for path in self.folder.iterdir()) + 10

    def compute(self, folder: Path) -> str:
        self.reads += 1
        return weights_digest(folder)

    def digest(self, *, kept_from: int = 0) -> str:
        return cached_weights_digest(
            self.folder, self.cache, kept_from=kept_from, compute=self.compute, clock=lambda: self.now
        )


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    shutil.copytree(builtin_folder("tiny-adder", "INT4"), tmp_path / "model")
    return Reader(tmp_path / "model", tmp_path / "cache")


def test_weights_that_did_not_change_are_read_once(reader: Reader) -> None:
    expected = weights_digest(reader.folder)
    assert [reader.digest() for _ in range(3)] == [expected] * 3
    assert reader.reads == 1


def test_a_change_is_seen_even_where_size_and_time_of_change_are_kept(reader: Reader) -> None:
    before = reader.digest()
    weights = reader.folder / "model.safetensors"
    times, data = weights.stat(), bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert weights.stat().st_mtime_ns == times.st_mtime_ns
    reader.settle()
    assert reader.digest() == weights_digest(reader.folder) != before
    assert reader.reads == 2


def test_a_file_in_the_others_place_is_read(reader: Reader, tmp_path: Path) -> None:
    before = reader.digest()
    weights = reader.folder / "model.safetensors"
    shutil.copy2(weights, tmp_path / "copy")
    os.replace(tmp_path / "copy", weights)
    reader.settle()
    assert reader.digest() == before
    assert reader.reads == 2


def test_what_has_only_just_been_written_is_not_kept(reader: Reader) -> None:
    reader.now -= 9
    assert reader.digest() == reader.digest()
    assert reader.reads == 2


def test_small_models_leave_nothing_and_a_cache_that_cannot_be_written_stops_nobody(reader: Reader) -> None:
    assert reader.digest(kept_from=1 << 30) == weights_digest(reader.folder)
    assert not reader.cache.root.exists()
    reader.cache.root.write_text("a file in its place")
    assert reader.digest() == reader.digest() == weights_digest(reader.folder)
    assert reader.reads == 3


def test_a_template_of_orbits_counts_as_the_missing_file(tmp_path: Path) -> None:
    folder = write_deepseek_v4(tmp_path / "model")
    before = file_digests(folder)
    assert set(before) == {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    (folder / "chat_template.jinja").write_bytes((TEMPLATES / "deepseek_v4.jinja").read_bytes())
    assert file_digests(folder) == before
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert file_digests(folder)["chat_template.jinja"] != before["chat_template.jinja"]


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
def test_a_folder_with_a_template_needs_none_of_orbits(tmp_path: Path, name: str) -> None:
    folder = write_deepseek_v4(tmp_path / "model")
    assert own_template(folder) == TEMPLATES / "deepseek_v4.jinja"
    (folder / name).write_text('{"chat_template": "{{ messages }}"}')
    assert own_template(folder) is None
