"""What a result was measured on and with: card, driver, libraries, commit, and how they differ from Orbit's pins.

    python -m tools.gpu_proof.machine      prints it as JSON; in a process of its own, so that no other holds a device

Belongs here: asking. Does not belong here: refusing; a machine with other versions is told and measured all the same.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.harness import ROOT
from tools.gpu_proof.record import NO_CARD


def machine_facts() -> dict[str, Any]:
    """`card` is `NO_CARD` where torch finds no CUDA device."""
    import torch

    facts: dict[str, Any] = {
        "card": NO_CARD,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "versions": {name: installed(name) for name in ("triton", "transformers", "peft", "trl")},
        "pins": [each for each in pins() if not each["agrees"]],
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "card": torch.cuda.get_device_name(0),
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "driver": driver(),
        }
    return facts


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def pins() -> list[dict[str, Any]]:
    """Every requirement of the light install and of the trainer, and what is installed here."""
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = []
    for line in dict.fromkeys((*project["dependencies"], *project["optional-dependencies"]["train"])):
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate():
            here = installed(requirement.name)
            agrees = here is not None and requirement.specifier.contains(here, prereleases=True)
            found.append(
                {"package": requirement.name, "wanted": str(requirement.specifier), "here": here, "agrees": agrees}
            )
    return found


def driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    json.dump(machine_facts(), sys.stdout)
