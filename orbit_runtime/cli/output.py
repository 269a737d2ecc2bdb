"""Printing results: JSON for programs, short tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """One indented JSON document on standard output."""
    import json

    print(json.dumps(value, indent=2, default=str))


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


def before_and_after(facts: Mapping[str, Any]) -> tuple[str, str, str]:
    """First value, last value and change of a run's main metric, from `Report.to_json`.

    A reward is the mean of several steps where the run has them: one batch may have other prompts than another.
    """
    gain = facts.get("gain")
    if gain:
        margin = "" if gain["margin"] is None else f" ± {gain['margin']:.4f}"
        over = "" if gain["steps"] == 1 else f", means of {gain['steps']} steps"
        change = f" ({gain['difference']:+.4f}{margin}{over})"
        return format_number(gain["first"]), format_number(gain["last"]), change
    headline = facts.get("headline") or {"first": facts.get("reward_first"), "last": facts.get("reward_last")}
    first, last = headline["first"], headline["last"]
    change = "" if first is None or last is None else f" ({last - first:+.4f})"
    return format_number(first), format_number(last), change
