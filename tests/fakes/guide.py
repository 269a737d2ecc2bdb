"""A guide's files and commands, to be executed as a reader would.

Belongs here: reading fenced blocks. Does not belong here: what a guide needs around it (its test).
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import chdir, redirect_stdout
from pathlib import Path
from string import Template

import pytest

from orbit_runtime.cli.main import run_command

ROOT = Path(__file__).resolve().parents[2]


def write_files(guide: str, folder: Path) -> None:
    """Every block that begins with `# file: NAME`."""
    for name, text in re.findall(r"```\w+\n# file: (\S+)\n(.*?)```", guide, re.DOTALL):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def commands(guide: str, heading: str) -> list[str]:
    """The shell blocks below a heading."""
    section = re.split(r"^## ", guide, flags=re.MULTILINE)
    (text,) = [each for each in section if each.startswith(f"{heading}\n")]
    return re.findall(r"```sh\n(.*?)```", text, re.DOTALL)


def run_in_process(text: str, folder: Path, environment: Mapping[str, str] | None = None) -> None:
    """One block whose lines are `orbit …` and at most `> FILE`: a start of Python each costs more than the command."""
    values = {**os.environ, **(environment or {})}
    with chdir(folder), pytest.MonkeyPatch.context() as patch:
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        for line in text.splitlines():
            command, _, target = (each.strip() for each in line.partition(" > "))
            program, *arguments = [Template(word).substitute(values) for word in shlex.split(command)]
            assert program == "orbit", line
            said = io.StringIO()
            with redirect_stdout(said):
                code = run_command(arguments)
            assert code == 0, f"{line}\n{said.getvalue()}"
            if target:
                Path(target).write_text(said.getvalue())


def run_shell(text: str, folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """One block, with this checkout's `orbit`; the first command that fails ends it."""
    shim = folder / "bin/orbit"
    shim.parent.mkdir(exist_ok=True)
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m orbit_runtime.cli.main "$@"\n')
    shim.chmod(0o755)
    path = f"{shim.parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
