"""Trajectory items as JSON and CSV, written and read back unchanged.

A CSV cell holds a text unchanged, and anything else as JSON. A text that would be misread gets a leading apostrophe,
which marks text in spreadsheets: a text that is valid JSON, and one that a spreadsheet would run as a formula (`=`,
`+`, `-`, `@`). Reading removes the apostrophe.

Belongs here: both formats. Does not belong here: which values can be written (`values`).
"""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orbit_runtime.agents.items import TrajectoryItem, item_from
from orbit_runtime.agents.values import decode, encode
from orbit_runtime.errors import DataError, OutputError

COLUMNS = ("state", "action", "reward", "metadata")
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Includes full-width forms, which spreadsheets treat alike."""


def to_json(items: Sequence[TrajectoryItem]) -> str:
    rows = [
        {name: encode(getattr(item, name), f"items[{index}].{name}") for name in COLUMNS}
        for index, item in enumerate(items)
    ]
    return _dump(rows, indent=1) + "\n"


def from_json(text: str, where: str) -> list[TrajectoryItem]:
    rows = _parse(text, where, "JSON")
    if not isinstance(rows, list):
        raise DataError(
            "the file does not contain a list", where=where, fix="give a list of objects with `state` and `action`"
        )
    return [item_from(decode(row), f"{where}: items[{index}]") for index, row in enumerate(rows)]


def to_csv(items: Sequence[TrajectoryItem]) -> str:
    target = io.StringIO(newline="")
    writer = csv.writer(target)
    writer.writerow(COLUMNS)
    for index, item in enumerate(items):
        writer.writerow([_to_cell(getattr(item, name), f"items[{index}].{name}") for name in COLUMNS])
    return target.getvalue()


def from_csv(text: str, where: str) -> list[TrajectoryItem]:
    items = []
    with _long_cells():
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        try:
            header = next(reader, [])
            missing = [name for name in COLUMNS[:2] if name not in header]
            strange = [name for name in header if name not in COLUMNS]
            if missing or strange:
                raise DataError(
                    f"the columns are {', '.join(map(repr, header)) or 'none'}",
                    where=f"{where}: line 1",
                    fix=f"name them {', '.join(COLUMNS)}; the last two may be left out",
                )
            for row in reader:
                line = f"{where}: line {reader.line_num}"
                if not row:
                    continue
                if len(row) != len(header):
                    raise DataError(
                        f"{len(row)} cells, but {len(header)} columns", where=line, fix="give every row all columns"
                    )
                items.append(item_from(dict(zip(header, map(_from_cell, row), strict=True)), line))
        except csv.Error as error:
            raise DataError(f"not CSV: {error}", where=f"{where}: line {reader.line_num}") from None
    return items


def save(path: str | os.PathLike[str], text: str) -> None:
    """Writes atomically: a reader never sees half a file."""
    target = Path(path)
    partial = target.with_name(f"{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
        partial.replace(target)
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror or error}", where=str(path)) from None


def load(
    source: str | os.PathLike[str], read: Callable[[str, str], list[TrajectoryItem]], *, is_text: Callable[[str], bool]
) -> list[TrajectoryItem]:
    """Items from a file, or from the text itself."""
    if isinstance(source, str) and is_text(source):
        return read(source, "text")
    try:
        text = Path(source).read_bytes().decode("utf-8-sig")
    except OSError as error:
        fix = "check the path"
        raise DataError(f"cannot be read: {error.strerror or error}", where=str(source), fix=fix) from None
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8: {error.reason}", where=f"{source}: byte {error.start}") from None
    return read(text, str(source))


def _to_cell(value: Any, where: str) -> str:
    if not isinstance(value, str):
        # NaN and infinities contain nothing that a spreadsheet could run.
        return json.dumps(value) if isinstance(value, float) else _dump(encode(value, where))
    if value.startswith((*_FORMULA, "'")) or _is_json(value) or not _is_unicode(value):
        return f"'{value}" if _is_unicode(value) else _dump(value)
    return value


def _from_cell(cell: str) -> Any:
    if cell.startswith("'"):
        return cell[1:]
    try:
        return decode(json.loads(cell))
    except (ValueError, RecursionError):
        return cell


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _is_unicode(text: str) -> bool:
    """Whether UTF-8 can encode the text: Python's texts may contain lone surrogates, which it cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _dump(value: Any, indent: int | None = None) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    return text if _is_unicode(text) else json.dumps(value, allow_nan=False, indent=indent)


def _parse(text: str, where: str, kind: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not {kind}: {error}", where=where) from None


@contextmanager
def _long_cells() -> Iterator[None]:
    """Raises the limit of Python's CSV reader, 128 KiB per cell: an agent's state may be a whole page."""
    before = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        yield
    finally:
        csv.field_size_limit(before)
