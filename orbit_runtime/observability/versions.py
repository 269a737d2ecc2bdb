"""Versions of installed packages, for run.json and crash reports."""

from __future__ import annotations

from importlib import metadata

PACKAGES = ("torch", "transformers", "safetensors", "pydantic", "obstore")
"""Packages that can change a run's numbers or files."""


def installed_versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Package → version, for installed packages."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
