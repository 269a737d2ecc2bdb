"""`orbit init`: a manifest to start from."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import typer

from orbit_runtime.cli.arguments import AsJson
from orbit_runtime.cli.output import print_json
from orbit_runtime.errors import OutputError


def init(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")] = Path("run.yaml"),
    full: Annotated[bool, typer.Option("--full", help="Include all fields, as comments with their defaults.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a manifest to start from. It runs as it is.

    \f
    Raises:
        OutputError: a file is there already, or it cannot be written.
    """
    from orbit_runtime.spec.template import render_start, render_template

    if path.is_dir():
        raise OutputError("this is a folder", where=str(path), fix=f"name a file: {path / 'run.yaml'}")
    if path.exists() and not force:
        raise OutputError("the file is there already", where=str(path), fix="choose another name, or add --force")
    try:
        _write_whole(path, render_template(str(path)) if full else render_start(str(path)))
    except OSError as error:
        raise OutputError(
            f"the file cannot be written: {error.strerror or error}", where=str(path), fix="choose another place"
        ) from None
    if as_json:
        print_json({"path": str(path)})
    else:
        print(f"wrote {path}\nnext: orbit validate {path}, orbit run {path}")


def _write_whole(path: Path, text: str) -> None:
    """Writes all of the file or nothing: a file beside it, then a rename."""
    import tempfile

    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        # mkstemp's files are private to the user; this one is as shared as any other file they write.
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
