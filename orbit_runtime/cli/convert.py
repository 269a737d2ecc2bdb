"""`orbit convert`: prints what a conversion wrote and how far it is from its source.

Belongs here: arguments and tables. Does not belong here: the work (`checkpoints`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orbit_runtime.cli.bars import bytes_bar, stages
from orbit_runtime.cli.output import format_bytes, format_table, print_json
from orbit_runtime.cli.places import needed_folder
from orbit_runtime.errors import UnsupportedError, UsageError
from orbit_runtime.storage.opening import check_writable

if TYPE_CHECKING:
    from orbit_runtime.checkpoints.convert import Result


def run_convert(
    source: str,
    destination: Path,
    *,
    precision: str,
    layout: str | None,
    group_size: int | None,
    ignore: Sequence[str],
    shard_gigabytes: float,
    as_json: bool,
) -> None:
    """Converts and prints.

    Raises:
        UsageError: (64) the target cannot be written. ModelError: (66) the source is damaged.
        OutputError: (73) the destination holds something else. StorageError: (74) the disk is full.
        UnsupportedError: (78) this source cannot become this target.
    """
    from orbit_runtime.checkpoints.target import build_target

    target = build_target(precision, layout, group_size, ignore)
    # A shipped model is converted from its BF16 variant; that to BF16 has one source only.
    folder = needed_folder(source, precision="BF16" if precision != "BF16" else "Auto")
    if shard_gigabytes <= 0:
        raise UsageError("a shard cannot be that small", where="--shard-gb", fix="give a positive number")
    check_torch()
    check_writable(destination.absolute())
    with stages("convert") as stage:
        stage("importing torch")
        from orbit_runtime.checkpoints.convert import convert

    with bytes_bar("converting") as show:
        result = convert(folder, destination, target, show=show, shard_bytes=int(shard_gigabytes * 10**9))
    if as_json:
        print_json(result.to_json())
    else:
        print(format_result(result))


def check_torch() -> None:
    """Raises `UnsupportedError` (78) in a light install."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise UnsupportedError("this needs torch, which is not installed", fix="pip install 'orbit-rl[train]'")


def format_result(result: Result) -> str:
    """Error by name of module, the largest first; then what was written."""
    header = ("modules", "count", "relative RMS", "worst", "largest error")
    rows = [
        (each.modules, str(each.count), f"{each.relative_rms:.3%}", f"{each.worst_rms:.3%}", f"{each.max_error:.3g}")
        for each in result.summaries()
    ]
    share = result.bytes_after / result.bytes_before
    form = result.precision if result.layout == result.precision else f"{result.precision} ({result.layout})"
    lines = [format_table(header, rows), ""]
    if result.left_alone:
        lines.append(f"left as they were: {', '.join(result.left_alone)}")
    if result.reused:
        lines.append(f"{result.reused} of {result.files} files were there from an earlier start")
    lines.append(
        f"{result.folder}: {form}, {format_bytes(result.bytes_before)} -> {format_bytes(result.bytes_after)} "
        f"({share:.0%}); errors of every module in conversion.json"
    )
    return "\n".join(lines)
