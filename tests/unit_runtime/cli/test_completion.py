"""What the shell offers after TAB, asked for as the shell does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = "import sys; sys.argv[0] = 'orbit'; from orbit_runtime.cli.main import main; main()"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("runs/adder", "runs/group"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "runs/adder/run.json").write_text("{}")
    for name in ("run.yaml", "prompts.jsonl"):
        (tmp_path / name).write_text("")
    return tmp_path


def offered(words: str, folder: Path) -> list[str]:
    """What bash is given after these words."""
    count = len(words.split(" ")) - 1
    environ = {**os.environ, "_ORBIT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(count)}
    asked = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(asked, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=60)
    # What a shell does not read as an answer would be shown to the user, at each TAB.
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("orbit rep", ["replay", "report"]),
        ("orbit run ", ["run.yaml", "runs/"]),
        ("orbit report runs/", ["runs/adder", "runs/group/"]),
        ("orbit replay r", ["runs/"]),
        ("orbit ls runs/a", ["runs/adder"]),
        ("orbit report s3://bucket/", []),
    ],
)
def test_commands_manifests_and_run_folders_are_completed(words: str, expected: list[str], folder: Path) -> None:
    assert offered(words, folder) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_can_be_shown(shell: str, folder: Path) -> None:
    environ = {**os.environ, "_ORBIT_COMPLETE": f"source_{shell}"}
    shown = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=folder, env=environ, capture_output=True, text=True, check=False,
        timeout=60,
    )  # fmt: skip
    assert "_ORBIT_COMPLETE" in shown.stdout
