"""What a shell offers after TAB for a manifest or a run folder. Commands and options are completed by typer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

RUN_FILE = "run.json"


def complete_manifests(incomplete: str) -> list[str]:
    """YAML files, and folders on the way to one."""
    return _paths(incomplete, lambda path: path.suffix in (".yaml", ".yml"))


def complete_runs(incomplete: str) -> list[str]:
    """Local run folders, and folders on the way to one. Of a store nothing is listed: a TAB does not ask a network."""
    return [] if "://" in incomplete else _paths(incomplete, lambda path: (path / RUN_FILE).is_file())


def _paths(incomplete: str, is_wanted: Callable[[Path], bool]) -> list[str]:
    """As the user writes them; a folder that is not wanted itself ends in a slash."""
    head, slash, tail = incomplete.rpartition("/")
    found = []
    try:
        entries = sorted(Path(head + slash or ".").iterdir())
    except OSError:
        return []
    for path in entries:
        if not path.name.startswith(tail) or (path.name.startswith(".") and not tail):
            continue
        if is_wanted(path):
            found.append(f"{head}{slash}{path.name}")
        elif path.is_dir():
            found.append(f"{head}{slash}{path.name}/")
    return found
