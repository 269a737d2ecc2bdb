"""Arguments that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

RUN_FILE = "run.json"


def complete_manifests(incomplete: str) -> list[str]:
    """YAML files, and folders on the way to one."""
    return _paths(incomplete, lambda path: path.suffix in (".yaml", ".yml"))


def complete_runs(incomplete: str) -> list[str]:
    """Local run folders, and folders on the way to one. Of a store nothing is listed: a TAB does not ask a network."""
    return [] if "://" in incomplete else _paths(incomplete, lambda path: (path / RUN_FILE).is_file())


def _paths(incomplete: str, is_wanted: Callable[[Path], bool]) -> list[str]:
    """Paths in the user's own spelling; a folder that is not wanted itself ends in a slash."""
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


Manifest = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="The OrbitRun manifest (YAML).", autocompletion=complete_manifests),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Set a field, such as spec.training.steps=5. Repeatable."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Out = Annotated[str | None, typer.Option(metavar="URI", help="The run folder itself; by default, storage.uri/name.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print every process that it would start, and start nothing.")]
