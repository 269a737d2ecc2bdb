"""`orbit convert`: prints what a conversion wrote and how far it is from its source."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orbit_runtime.cli.output import AsJson, format_bytes, format_json, format_table
from orbit_runtime.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from orbit_runtime.checkpoints.convert import ConversionResult


def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The model's folder, or builtin://.")],
    destination: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write to, new or empty.")],
    precision: Annotated[
        str, typer.Option(metavar="FORMAT", help="INT4, FP8, NVFP4 or MXFP4; BF16 unpacks a packed model exactly.")
    ],
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Other layout of the format: INT4Asymmetric, FP8 (a scale per row), FP8BlockCT, NVFP4ModelOpt.",
        ),
    ] = None,
    group_size: Annotated[int | None, typer.Option(metavar="N", help="INT4: columns that share a scale. [32]")] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Leave these modules in BF16 too: a name, its last part, or re: and an expression. "
            "Repeatable. Head, embeddings, norms, routers and vision always stay in BF16.",
        ),
    ] = None,
    shard_gb: Annotated[float, typer.Option(metavar="GB", help="Maximum size of a file.")] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in another format. Reports the error of every module; continues after an interruption.

    \f
    Raises:
        UsageError: (64) the target cannot be written. ModelError: (66) the source is damaged.
        OutputError: (73) the destination holds something else. StorageError: (74) the disk is full.
        UnsupportedError: (78) this source cannot become this target.
    """
    from orbit_runtime.checkpoints.target import build_target
    from orbit_runtime.cli.addresses import needed_folder
    from orbit_runtime.cli.bars import bytes_bar, stages
    from orbit_runtime.storage.opening import check_writable

    target = build_target(precision, layout, group_size, ignore or [])
    # A shipped model is converted from its BF16 variant; that to BF16 has one source only.
    folder = needed_folder(source, precision="BF16" if precision != "BF16" else "Auto")
    if shard_gb <= 0:
        raise UsageError("a shard cannot be that small", where="--shard-gb", fix="give a positive number")
    check_torch()
    check_writable(destination.absolute())
    with stages("convert") as stage:
        stage("importing torch")
        from orbit_runtime.checkpoints.convert import convert as write_converted

    with bytes_bar("converting") as show:
        result = write_converted(
            folder, destination, target, show=show, shard_bytes=int(shard_gb * 10**9), is_default=layout is None
        )
    print(format_json(result.to_json()) if as_json else format_result(result))


def check_torch() -> None:
    """Raises `UnsupportedError` (78) in a light install."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise UnsupportedError("this needs torch, which is not installed", fix="pip install 'orbit-rl[train]'")


def format_result(result: ConversionResult) -> str:
    """Error by name of module, the largest first; then what was written."""
    header = ("modules", "count", "relative RMS", "worst", "largest error")
    rows = [
        (each.modules, str(each.count), f"{each.relative_rms:.3%}", f"{each.worst_rms:.3%}", f"{each.max_error:.3g}")
        for each in result.summaries()
    ]
    share = result.bytes_after / result.bytes_before
    form = result.precision if result.layout == result.precision else f"{result.precision} ({result.layout})"
    lines = [format_table(header, rows), ""]
    if result.normal_rms is not None:
        lines.append(
            f"normally distributed weights have {result.normal_rms:.1%}: a module near that is as good as can be"
        )
    if result.note:
        lines.append(result.note)
    if result.left_alone:
        lines.append(f"left as they were: {', '.join(result.left_alone)}")
    if result.reused:
        lines.append(f"{result.reused} of {result.files} files were there from an earlier start")
    lines.append(
        f"{result.folder}: {form}, {format_bytes(result.bytes_before)} -> {format_bytes(result.bytes_after)} "
        f"({share:.0%}); errors of every module in conversion.json"
    )
    return "\n".join(lines)
