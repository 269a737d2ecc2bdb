"""What a command says before it imports torch, which takes seconds; torch is a stand-in that tells when. And Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orbit_runtime.cli.main import run_command

ROOT = Path(__file__).resolve().parents[3]
STAND_IN = """
import sys
print("torch is imported", file=sys.stderr, flush=True)
sys.exit(3)
"""
COMMANDS = {
    "merge": ["merge", "adapter", "--base", "builtin://tiny-adder", "--out", "{out}"],
    "convert": ["convert", "builtin://tiny-adder", "{out}", "--precision", "FP8"],
}


def run(name: str, folder: Path, out: str) -> subprocess.CompletedProcess[str]:
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(STAND_IN)
    path = os.pathsep.join([str(folder), str(ROOT)])
    arguments = [each.format(out=out) for each in COMMANDS[name]]
    return subprocess.run(
        [sys.executable, "-m", "orbit_runtime", *arguments], cwd=folder, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_the_import_of_torch_is_said_before_it_begins(name: str, tmp_path: Path) -> None:
    ended = run(name, tmp_path, "out")
    said, _, after = ended.stderr.partition("torch is imported")
    assert after, ended.stderr
    assert "importing torch" in said
    assert ended.stdout == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_that_cannot_be_written_is_told_before_torch_is_imported(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = run(name, tmp_path, "file/out")
    assert (ended.returncode, ended.stdout) == (73, "")
    assert "torch" not in ended.stderr
    assert ended.stderr.startswith(f"error: {tmp_path}/file/out: {tmp_path}/file is a file, not a folder\n  fix: ")


@pytest.mark.parametrize("weight", ["nan", "inf"])
def test_a_weight_that_is_no_number_is_refused_before_torch_is_imported(
    weight: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["merge", "a", "b", "--out", str(tmp_path / "out"), "--weight", weight]) == 64
    assert "--weight: a weight is a finite number\n  fix: " in capsys.readouterr().err


def test_inspect_says_that_a_folder_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["inspect", str(tmp_path / "none")]) == 66
    assert "none: " in (said := capsys.readouterr().err)
    assert "model.safetensors" not in said


def test_ctrl_c_while_the_command_line_is_imported_ends_it_with_75(tmp_path: Path) -> None:
    """`typer` is a stand-in that presses it."""
    (tmp_path / "typer").mkdir()
    (tmp_path / "typer" / "__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    # A shell started in the background lets its children inherit that Ctrl-C means nothing.
    heeding = "import signal, runpy; signal.signal(signal.SIGINT, signal.default_int_handler); "
    ended = subprocess.run(
        [sys.executable, "-c", heeding + "runpy.run_module('orbit_runtime', run_name='__main__')", "--help"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (75, "")
    assert ended.stderr == "stopped on request, before anything began\n"


def test_a_stop_within_a_librarys_own_code_ends_with_75_and_not_by_a_signal(tmp_path: Path) -> None:
    """Python ends itself by SIGINT where a KeyboardInterrupt has passed through code that was run from C."""
    program = tmp_path / "program.py"
    program.write_text(
        "import code, ctypes, sys\n"
        "from orbit_runtime.cli.main import end_stopped\n"
        "try:\n"
        "    ctypes.pythonapi.PyRun_SimpleString(b'import sys; sys.excepthook = lambda *_: None; "
        "raise KeyboardInterrupt')\n"
        "except KeyboardInterrupt:\n"
        "    pass\n"
        "print('written', end='')\n"
        "end_stopped()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "program"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (75, "written")
