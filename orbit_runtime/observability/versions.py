"""What is installed here, for run.json and crash reports.

Belongs here: asking the installation, without importing anything. Does not belong here: judging versions (`doctor`).
"""

from __future__ import annotations

from importlib import metadata

PACKAGES = ("torch", "transformers", "safetensors", "pydantic", "obstore")
"""Those that can change a run's numbers or what it keeps."""


def installed_versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Package → version; one that is not installed is left out."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
