"""How a run ended, in the few kB that outlive its pod's log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orbit_runtime.cli.main import run_command
from orbit_runtime.errors import CredentialsError, ManifestError, UsageError
from orbit_runtime.observability.termination_message import FILE_VARIABLE, LARGEST, add_last_words, build_message


def test_what_the_run_and_what_its_error_say_is_one_line(tmp_path: Path) -> None:
    place = {FILE_VARIABLE: str(tmp_path / "log")}
    add_last_words({"run": "adder", "step": 3, "reward": None}, place)
    error = CredentialsError("the store refused the key", where="s3://models", fix="check the secret")
    add_last_words(build_message(error), place)
    text = (tmp_path / "log").read_text()
    assert len(text.splitlines()) == 1
    assert json.loads(text) == {
        "run": "adder", "step": 3, "error": "CredentialsError", "exit_code": 77, "who_acts": "user",
        "message": "the store refused the key", "where": "s3://models", "fix": "check the secret",
    }  # fmt: skip


@pytest.mark.parametrize("letter", ["x", "\\", "é", "数", "\U0001f600", "\x01", "\udcff"])
def test_the_kubelet_keeps_all_of_it(letter: str, tmp_path: Path) -> None:
    place = {FILE_VARIABLE: str(tmp_path / "log")}
    add_last_words(dict.fromkeys(("message", "where", "fix"), letter * 50000) | {"step": 3}, place)
    line = (tmp_path / "log").read_bytes()
    assert len(line) <= LARGEST
    assert json.loads(line)["step"] == 3


def test_every_finding_of_a_manifest_is_named() -> None:
    found = tuple(UsageError("is impossible", where=f"spec.{name}") for name in "ab")
    words = build_message(ManifestError("run.yaml is wrong", fix="see the reference", problems=found))
    assert words["message"] == "run.yaml is wrong: spec.a: is impossible; spec.b: is impossible"


def test_without_a_place_and_without_the_right_nothing_happens(tmp_path: Path) -> None:
    add_last_words({"step": 3}, {})
    add_last_words({"step": 3}, {FILE_VARIABLE: str(tmp_path / "no" / "folder")})
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "log"))
    assert run_command(["run", str(tmp_path / "none.yaml")]) == 64
    said = json.loads((tmp_path / "log").read_text())
    assert (said["exit_code"], said["who_acts"]) == (64, "user")
    assert "none.yaml" in said["where"] + said["message"]
