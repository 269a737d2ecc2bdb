"""Queries the driver about its GPUs without torch, which would take memory on each of them.

Belongs here: running `nvidia-smi`. Does not belong here: interpreting the answer.
"""

from __future__ import annotations

import shutil
import subprocess


def ask_driver(fields: str) -> list[str]:
    """One line for each GPU that this process sees, in order; empty if the driver cannot be asked.

    Args:
        fields: as `--query-gpu` takes them, such as `name,memory.total`; memory is in MiB, without the unit.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    return [line for line in asked.stdout.splitlines() if line.strip()]
