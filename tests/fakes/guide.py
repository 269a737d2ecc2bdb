"""A guide's files and commands, to be executed as a reader would.

Belongs here: reading fenced blocks. Does not belong here: what a guide needs around it (its test).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

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
