"""`orbit merge`: prints what a merge wrote and what it costs.

Belongs here: arguments and tables. Does not belong here: the work (`checkpoints`).
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orbit_runtime.cli.convert import check_torch, format_result
from orbit_runtime.cli.output import AsJson, format_json
from orbit_runtime.errors import DataError, UsageError

if TYPE_CHECKING:
    from orbit_runtime.checkpoints.adapter_folder import AdapterFolder
    from orbit_runtime.checkpoints.cost import Cost


MAX_PROMPTS = 64
"""Most prompts of a file that are answered."""


def merge(
    adapters: Annotated[
        list[str], typer.Argument(metavar="ADAPTER...", help="Saved adapters: folders, URIs, or RUN@best.")
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to write to, new or empty.")],
    base: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Merge into this base. By default, several adapters into one."),
    ] = None,
    precision: Annotated[str, typer.Option(metavar="FORMAT", help="Format of the merged model.")] = "BF16",
    weight: Annotated[
        list[float] | None, typer.Option(metavar="W", help="LoRA: weight of each adapter, in their order. [1]")
    ] = None,
    measure: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Prompts (JSONL) to measure the cost in log-probs on; none: do not measure.",
        ),
    ] = "built-in",
    unchecked_base: Annotated[
        bool, typer.Option("--unchecked-base", help="Accept adapters that do not name their base.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Merge adapters into their base, or into one adapter. Measures the cost in log-probs.

    \f
    Raises:
        ModelError: (66) an adapter of another base, or a damaged file. DataError: (65) the prompts are unusable.
        OutputError: (73) the folder holds something else. UnsupportedError: (78) these do not merge.
    """
    from orbit_runtime.cli.bars import stages
    from orbit_runtime.storage.opening import check_writable

    if not all(map(math.isfinite, weight or [])):
        raise UsageError(
            "a weight is a finite number", where="--weight", fix="give a number such as 0.5 for each adapter"
        )
    check_torch()
    check_writable(out.absolute())
    with stages("merge") as stage:
        stage("importing torch")
        # Of what is imported below, all that takes seconds.
        import torch  # noqa: F401

        from orbit_runtime.checkpoints.adapter_folder import open_adapter

        stage("reading the adapters")
        read = [open_adapter(each) for each in adapters]
    for each in read:
        if each.chosen:
            print(f"{each.place} is {each.chosen}", file=sys.stderr)
    weights = weight or [1.0] * len(read)
    if base is None:
        _merge_adapters(read, weights, out, as_json=as_json)
    else:
        _merge_into_base(read, weights, out, base, precision, measure, unchecked=unchecked_base, as_json=as_json)


def _merge_adapters(read: list[AdapterFolder], weights: list[float], folder: Path, *, as_json: bool) -> None:
    from orbit_runtime.checkpoints.merge import combined_json, merge_adapters

    if len(read) < 2:
        raise UsageError(
            "one adapter alone has nothing to merge with",
            where="ADAPTER",
            fix="name its base with --base, or several adapters; a kept adapter is in PEFT's format already",
        )
    made = merge_adapters(read, weights, folder)
    if as_json:
        print(format_json(combined_json(made, folder)))
        return
    what = f"rank {made.rank}" if read[0].type == "LoRA" else f"blocks of {made.rank}"
    print(f"{folder}: one {read[0].type} adapter, {what}, {made.modules} modules")
    print(f"rounding: {made.deviation:.2g} of the largest value")


def _merge_into_base(
    read: list[AdapterFolder],
    weights: list[float],
    folder: Path,
    named: str,
    precision: str,
    measured: str,
    *,
    unchecked: bool,
    as_json: bool,
) -> None:
    from orbit_runtime.checkpoints.merge import NamedBase, base_target, merge_into_base
    from orbit_runtime.checkpoints.target import build_target
    from orbit_runtime.cli.addresses import needed_folder
    from orbit_runtime.cli.bars import bytes_bar, stages

    base = needed_folder(named)
    target = base_target(base, precision) or build_target(precision, None, None, ())
    prompts = _read_prompts(measured)
    with bytes_bar("merging") as show:
        merged = merge_into_base(
            NamedBase(base, named),
            read,
            weights,
            folder,
            target,
            unchecked=unchecked,
            show=show,
        )
    cost = None
    if prompts:
        from orbit_runtime.checkpoints.cost import measure

        with stages("merge") as stage:
            stage(f"measuring the cost on {len(prompts)} prompts")
            cost = measure(base, folder, merged.combined, prompts)
    if as_json:
        print(format_json({**merged.to_json(), "cost": cost.difference.to_json() if cost else None}))
        return
    print(format_result(merged.written))
    print(f"{len(merged.modules)} modules changed by {len(read)} adapter{'s' if len(read) > 1 else ''}")
    if cost is not None:
        print(format_cost(cost))


def format_cost(cost: Cost) -> str:
    d = cost.difference
    return (
        f"merged against base and adapter, {cost.new_tokens} tokens of {cost.prompts} answers: "
        f"mean |Δ log-prob| {d.mean:.2g}, p99 {d.p99:.2g}, max {d.max:.2g}, k3 {d.k3:.2g}"
    )


def _read_prompts(asked: str) -> list[str]:
    """The last message of each row's prompt; the built-in prompts, or none at all."""
    if asked == "none":
        return []
    if asked == "built-in":
        from orbit_runtime.checkpoints.cost import PROMPTS

        return list(PROMPTS)
    from orbit_runtime.data.prompts import load_prompts
    from orbit_runtime.data.rows import PromptSource

    try:
        table = load_prompts([PromptSource(asked, field=None)], limit=MAX_PROMPTS)
    except DataError as error:
        # Without a manifest, what a manifest's prompts could be corrected by is no help.
        fix = 'name a file with lines such as {"prompt": "12+34="}, or none'
        raise DataError(error.message, where=f"--measure {asked}", fix=fix) from None
    return [str(prompt.messages[-1]["content"]) for prompt in table.prompts_P]
