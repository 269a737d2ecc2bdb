"""`orbit init`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orbit_runtime.cli.init import init
from orbit_runtime.errors import ModelError, OutputError, UsageError
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.spec import load_manifest
from orbit_runtime.spec.template import render_start_of


def test_it_writes_a_manifest_that_is_valid_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    init(path, force=False, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"path": str(path)}
    assert load_manifest(path).name == "my-run"
    assert [each.name for each in tmp_path.iterdir()] == ["run.yaml"]


def test_it_is_short_and_names_the_way_to_all_fields(tmp_path: Path) -> None:
    short, full = tmp_path / "short.yaml", tmp_path / "full.yaml"
    init(short, force=False, as_json=False)
    init(full, force=False, as_json=False, full=True)
    assert len(short.read_text().splitlines()) <= 25
    assert "orbit init --full" in short.read_text()
    assert len(full.read_text().splitlines()) > 200
    assert load_manifest(full).name == "my-run"


def test_it_writes_what_suits_a_model(tmp_path: Path) -> None:
    path, folder = tmp_path / "run.yaml", builtin_folder("tiny-adder", "NVFP4")
    init(path, model=folder, as_json=False)
    spec = load_manifest(path).spec
    assert (spec.model.uri, spec.model.precision) == (str(folder.resolve()), "NVFP4")
    assert (spec.training.learning_rate, spec.training.prompts_per_step) == (2e-3, 8)
    assert "learningRate: 0.0005\n" in render_start_of("run.yaml", "a: b", "BF16", 134_000_000)
    with pytest.raises(ModelError):
        init(path, model=tmp_path, force=True, as_json=False)
    with pytest.raises(UsageError):
        init(path, model=folder, full=True, force=True, as_json=False)
    assert load_manifest(path).spec.model.precision == "NVFP4", "the file stays as it was"


def test_a_file_that_is_there_is_kept_without_force(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("mine")
    with pytest.raises(OutputError) as caught:
        init(path, force=False, as_json=False)
    assert caught.value.exit_code == 73
    assert path.read_text() == "mine"
    init(path, force=True, as_json=False)
    assert load_manifest(path).name == "my-run"


@pytest.mark.parametrize("place", ["missing/run.yaml", "."])
def test_a_place_that_cannot_be_written_is_one_message(tmp_path: Path, place: str) -> None:
    with pytest.raises(OutputError):
        init(tmp_path / place, force=True, as_json=False)
    assert list(tmp_path.iterdir()) == []
