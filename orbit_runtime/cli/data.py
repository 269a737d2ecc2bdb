"""`orbit data prepare`: its signature, and what it prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orbit_runtime.cli.output import AsJson
from orbit_runtime.errors import UsageError

if TYPE_CHECKING:
    from orbit_runtime.data.shapes import Shape

data = typer.Typer(name="data", help="Prepare prompts.", rich_markup_mode=None, no_args_is_help=True)

Columns = Annotated[
    list[str] | None,
    typer.Option(metavar="COLUMN", help="Repeatable: the first that a row has is used; a.b is b within a."),
]


@data.command()
def prepare(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A file or folder: a path, hf://, s3://.")],
    out: Annotated[Path, typer.Argument(metavar="FILE", help="File to write, in JSON lines.")],
    shape: Annotated[
        str,
        typer.Option("--format", metavar="NAME", help="gsm8k, math, aime, gpqa, mmlu, verl, mbpp, apps or plain."),
    ] = "plain",
    prompt: Columns = None,
    answer: Columns = None,
    choices: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN", help="One column with a list, or one for each choice, the right one first. Repeatable."
        ),
    ] = None,
    tests: Annotated[list[str] | None, typer.Option(metavar="COLUMN", help="Column with a program's tests.")] = None,
    keep: Annotated[list[str] | None, typer.Option(metavar="COLUMN", help="Keep this column too. Repeatable.")] = None,
    extract: Annotated[
        str | None,
        typer.Option(metavar="HOW", help="How to find the answer in its column: hash (####), boxed, integer or none."),
    ] = None,
    instruction: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Text after each prompt; '' for none. [the format's]")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the order of choices.")] = 0,
    keep_order: Annotated[bool, typer.Option("--keep-order", help="Keep the order of a list of choices.")] = False,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Write at most this many rows.")] = None,
    deduplicate: Annotated[
        bool, typer.Option("--deduplicate", help="Leave out repeated questions, ignoring case and white space.")
    ] = False,
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Leave out rows that cannot be prepared, and count them.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the output of another preparation.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a run's prompts from a well-known file. Records digests of both; repeating the command does nothing."""
    from orbit_runtime.data.preparation import PreparationSettings
    from orbit_runtime.data.shapes import RequestedShape

    named = {"prompt": prompt, "answer": answer, "choices": choices, "tests": tests}
    columns = {name: tuple(given) for name, given in named.items() if given}
    asked = RequestedShape(_shape(shape, columns, tuple(keep or ()), extract, instruction), seed, not keep_order)
    _run(source, out, PreparationSettings(asked, limit, deduplicate, skip_broken), force=force, as_json=as_json)


def _shape(
    name: str, columns: dict[str, Any], kept: tuple[str, ...], extract: str | None, instruction: str | None
) -> Shape:
    from orbit_runtime.data.shapes import EXTRACT, SHAPES

    if name not in SHAPES:
        raise UsageError(f"no format is called {name!r}", where="--format", fix=f"one of: {', '.join(SHAPES)}")
    if extract is not None and extract not in EXTRACT:
        raise UsageError(f"nothing is extracted by {extract!r}", where="--extract", fix=f"one of: {', '.join(EXTRACT)}")
    found = SHAPES[name]
    if "choices" in columns or "tests" in columns:
        # What a format expects of an answer is not what this one has.
        found = replace(found, choices=(), tests=(), reward="MultipleChoice" if "choices" in columns else "Code")
    changed = replace(found, **columns, kept=(*found.kept, *kept))
    return replace(
        changed,
        extract=changed.extract if extract is None else extract,
        instruction=changed.instruction if instruction is None else instruction,
    )


def _run(source: str, out: Path, preparation: object, *, force: bool, as_json: bool) -> None:
    from orbit_runtime.cli.bars import bytes_bar, steps_bar
    from orbit_runtime.cli.output import format_json
    from orbit_runtime.data.preparation import PreparationSettings, manifest_path, prepare
    from orbit_runtime.data.rows import PromptSource
    from orbit_runtime.storage.cache import RetryPolicy
    from orbit_runtime.storage.inputs import FetchedInput, fetch_input

    assert isinstance(preparation, PreparationSettings)
    with bytes_bar("fetching") as show:
        patience = RetryPolicy(tell=lambda each: show(each.done, each.total, each.what))
        fetched = (
            FetchedInput(Path(), source)
            if source.startswith("builtin://")
            else fetch_input(source, "prompts", "SOURCE", patience=patience)
        )
    local = None if source.startswith("builtin://") else fetched.path
    with steps_bar("preparing") as tell:
        asked = PromptSource(source, local=local, field=None)
        made = prepare(asked, out, preparation, revision=fetched.revision, force=force, tell=tell)
    manifest, shape = made.manifest, preparation.asked.shape
    if as_json:
        print(format_json({"file": str(out), "manifest": str(manifest_path(out)), "is_new": made.is_new, **manifest}))
        return
    left_out = ", ".join(f"{count} {why}" for why, count in manifest["left_out"].items())
    print(
        f"{out}: {manifest['result']['rows']} rows of {manifest['source']['rows']}"
        + (f"; left out: {left_out}" if left_out else "")
        + ("" if made.is_new else "; it was there already")
    )
    arguments = "" if shape.reward == "Code" else ", arguments: {field: answer}"
    print(f"reward: {{name: correct, type: {shape.reward}{arguments}}}")
