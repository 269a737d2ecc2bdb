"""No SGLang where one was to be started: 78 with how to install it, and nothing that calls it a bug or a death."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orbit_runtime.errors import UnsupportedError
from orbit_runtime.workers.servers.process import PYTHON_VARIABLE, ServerProcess, launch_command, launch_environment

ROOT = Path(__file__).parents[4]


def test_an_interpreter_that_is_not_there_is_told_by_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "no" / "python"))
    with pytest.raises(UnsupportedError, match=r"SGLang cannot be started: .*/no/python: No such file") as caught:
        ServerProcess("SGLang", launch_command(["--port", "1"]), environment=os.environ, log=tmp_path / "log")
    assert (caught.value.exit_code, caught.value.where) == (78, PYTHON_VARIABLE)
    assert "pip install 'orbit-rl[sglang]'" in str(caught.value.fix)
    assert "runs.engineImage" in str(caught.value.fix)


def test_a_file_that_is_no_program_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").write_text("")
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "python"))
    with pytest.raises(UnsupportedError, match="Permission denied"):
        ServerProcess("SGLang", launch_command([]), environment=os.environ, log=tmp_path / "log")


def test_a_log_that_cannot_be_written_is_no_missing_engine(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    with pytest.raises(IsADirectoryError):
        ServerProcess("SGLang", [sys.executable, "-c", ""], environment=os.environ, log=tmp_path / "log")


def test_an_interpreter_without_sglang_is_told_with_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    probe = [sys.executable, "-c", "import importlib.util as u; raise SystemExit(u.find_spec('sglang') is not None)"]
    if subprocess.run(probe, check=False).returncode:
        pytest.skip("this environment has SGLang")
    process = ServerProcess(
        "SGLang", launch_command(["--port", "1"]), environment=launch_environment({}), log=tmp_path / "log"
    )
    with pytest.raises(UnsupportedError, match=f"SGLang is not installed for {sys.executable}") as caught:
        process.wait_until(lambda: False, seconds=120)
    assert caught.value.exit_code == 78
    assert "ORBIT_SGLANG_PYTHON" in str(caught.value.fix)


def test_arguments_that_the_installed_sglang_does_not_know_are_told_by_their_field(tmp_path: Path) -> None:
    told = UnsupportedError("it does not know --ep-size", where="spec.rollout.engineArguments", fix="remove it")
    code = f"import sys; print({json.dumps(told.to_json())!r}, file=sys.stderr); sys.exit(78)"
    process = ServerProcess("SGLang", [sys.executable, "-c", code], environment=os.environ, log=tmp_path / "log")
    with pytest.raises(UnsupportedError, match="does not know --ep-size") as caught:
        process.wait_until(lambda: False, seconds=60)
    assert caught.value.where == "spec.rollout.engineArguments"
