"""A server of another SGLang is refused by the launcher itself, before it loads anything, with both versions."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from orbit_runtime.errors import EngineDiedError, UnsupportedError
from orbit_runtime.rollout.sglang_server import ServerSettings, SGLangServer
from orbit_runtime.workers.servers.process import PINNED_SGLANG, PYTHON_VARIABLE

SETTINGS = ServerSettings(
    model=Path("/nowhere"), device="cpu", dtype="float32", targets=("q_proj",), max_running_requests=1,
    max_sequence_length=64, seed=0,
)  # fmt: skip


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site folder before all others, in which an SGLang can be said to be."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    return tmp_path / "site"


def install(site: Path, version: str) -> None:
    about = site / f"sglang-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    (site / "sglang.py").write_text("raise ImportError('the fake SGLang was imported')\n")


def start(folder: Path, engine_version: Literal["Pinned", "Any"] = "Pinned") -> None:
    server = SGLangServer(replace(SETTINGS, engine_version=engine_version), log=folder / "sglang.log")
    try:
        server.start()
    finally:
        server.stop()


def test_another_version_is_refused_with_both_versions_and_how_to_go_on(installed: Path, tmp_path: Path) -> None:
    install(installed, "0.5.22")
    with pytest.raises(UnsupportedError, match=f"SGLang 0.5.22 .* made for SGLang {PINNED_SGLANG}") as caught:
        start(tmp_path)
    assert caught.value.exit_code == 78
    assert caught.value.where == "spec.rollout.engineVersion"
    assert "engineVersion: Any" in str(caught.value.fix)


@pytest.mark.parametrize(("version", "asked"), [("0.5.22", "Any"), (PINNED_SGLANG, "Pinned")])
def test_it_starts_where_the_version_is_the_pinned_one_or_any_is_asked_for(
    installed: Path, tmp_path: Path, version: str, asked: Literal["Pinned", "Any"]
) -> None:
    """It comes as far as importing SGLang, which this fake does not let it."""
    install(installed, version)
    with pytest.raises(EngineDiedError, match="the fake SGLang was imported"):
        start(tmp_path, asked)


def test_no_sglang_is_told_with_the_interpreter_and_what_to_install(installed: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="SGLang is not installed for ") as caught:
        start(tmp_path)
    assert "pip install 'orbit-rl[sglang]'" in str(caught.value.fix)
