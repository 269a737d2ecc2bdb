"""`orbit init`: a manifest to start from."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import typer

from orbit_runtime.cli.output import AsJson, format_json
from orbit_runtime.errors import OutputError, UsageError


def init(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")] = Path("run.yaml"),
    full: Annotated[bool, typer.Option("--full", help="Include all fields, as comments with their defaults.")] = False,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="FOLDER", help="Write what suits the model in this folder.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a manifest to start from. It runs as it is.

    \f
    Raises:
        OutputError: a file is there already, or it cannot be written.
        ModelError: the folder holds no model, or one of a type that is not known.
        UsageError: `--full` and `--model` together.
    """
    from orbit_runtime.spec.template import render_start, render_start_of, render_template

    if path.is_dir():
        raise OutputError("this is a folder", where=str(path), fix=f"name a file: {path / 'run.yaml'}")
    if path.exists() and not force:
        raise OutputError("the file is there already", where=str(path), fix="choose another name, or add --force")
    if full and model is not None:
        raise UsageError("`--full` shows defaults, which suit no model in particular", where="--model", fix="drop one")
    text = render_template(str(path)) if full else render_start(str(path))
    if model is not None:
        from orbit_runtime.model_info.checkpoint import folder_facts

        facts = folder_facts(model)
        size = facts.architecture.num_parameters()
        text = render_start_of(str(path), str(model.resolve()), facts.precision, size)
    try:
        _write_whole(path, text)
    except OSError as error:
        raise OutputError(
            f"the file cannot be written: {error.strerror or error}", where=str(path), fix="choose another place"
        ) from None
    print(
        format_json({"path": str(path)}) if as_json else f"wrote {path}\nnext: orbit validate {path}, orbit run {path}"
    )


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
