"""What several commands share: arguments, and printing of results, as JSON for programs or short tables for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer


def format_json(value: Mapping[str, Any] | Sequence[Any]) -> str:
    """One indented document."""
    import json

    return json.dumps(value, indent=2, default=str)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their longest cell."""
    table = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join(lines)


def format_number(value: float | None, spec: str = ".4f") -> str:
    """`-` where there is none."""
    return "-" if value is None else format(value, spec)


def format_bytes(count: int | None) -> str:
    """`12.3 MiB`."""
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def outcomes(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a run came to, from `Report.to_json`: its evaluations, then the reward or loss of its ends; names and texts.

    A reward is the mean of several steps where the run has them: one batch may have other prompts than another.
    """
    lines = []
    for name, points in (facts.get("evaluation") or {}).items():
        scored = [point for point in points if point["mean"] is not None]
        if not scored:
            lines.append((name, "no score"))
            continue
        first, last = scored[0], scored[-1]
        best = max(scored, key=lambda point: point["mean"])
        text = ", ".join(f"{each['mean']:.3f} at step {each['step']}" for each in (first, *scored[1:][-1:]))
        if (lower := best["mean"] - last["mean"]) >= 0.0005:
            text += f"; best {best['mean']:.3f} at step {best['step']}, last {lower:.3f} lower"
        lines.append((name, text))
    if gain := facts.get("gain"):
        margin = "" if gain["margin"] is None else f" ± {gain['margin']:.4f}"
        over = "step" if gain["steps"] == 1 else f"{gain['steps']} steps"
        change = f" ({gain['difference']:+.4f}{margin})"
        return [*lines, ("reward", f"{gain['first']:.4f} in the first {over}, {gain['last']:.4f} in the last{change}")]
    if lines:
        return lines
    headline = facts.get("headline") or {
        "name": "reward",
        "first": facts.get("reward_first"),
        "last": facts.get("reward_last"),
    }
    first, last = headline["first"], headline["last"]
    change = "" if first is None or last is None else f" ({last - first:+.4f})"
    ends = ("at first", "at best") if headline["name"] == "held-out loss" else ("in the first step", "in the last")
    text = f"{format_number(first)} {ends[0]}, {format_number(last)} {ends[1]}{change}"
    return [*lines, (headline["name"], text)]


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
