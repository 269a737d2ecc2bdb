"""The commands of `docs/guides/precision.md`, in their order, as a user would give them."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from orbit_runtime.checkpoints.target import WRITABLE
from orbit_runtime.cli.main import run_command

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs/guides/precision.md").read_text()


def test_every_command_of_the_guide_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "examples/quickstart.yaml", tmp_path)
    blocks = re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines()]
    assert len(commands) > 8
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "orbit"
        code = run_command(arguments)
        said = capsys.readouterr()
        assert code == 0, f"{command}\n{said.out}{said.err}"
        if "--base" in arguments:
            assert "mean |Δ log-prob|" in said.out


def test_the_guide_lists_every_layout_that_can_be_written() -> None:
    assert set(re.findall(r"^\|[^|]*\| `(\w+)`", GUIDE, re.MULTILINE)) | {"BF16"} == set(WRITABLE)
