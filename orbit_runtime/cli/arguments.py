"""Arguments that several commands have.

Belongs here: their help texts. Does not belong here: commands (`main`, `apart`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orbit_runtime.cli.completion import complete_manifests

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
