"""Rows of JSONL, CSV and Parquet files, checked whole before anything starts.

Belongs here: URIs, file formats, and errors that name file and line. Does not belong here: order and cursor
(`prompts`).
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from orbit_runtime.errors import DataError

Format = Literal["Auto", "JSONL", "CSV", "Parquet"]

BUILTIN = {name: f"{name}.jsonl" for name in ("two-digit-addition", "two-digit-multiplication")}
MAX_CELL = 1 << 30
"""Characters of a cell; Python's own limit is that of a short story."""
MAX_LISTED = 5
"""Broken lines named in one message."""


@dataclass(frozen=True, slots=True)
class PromptSource:
    """One entry of `data.prompts`.

    Example: `PromptSource("builtin://two-digit-addition")`
    """

    uri: str
    """A path, `file://…` or `builtin://…`."""
    format: Format = "Auto"
    prompt_field: str = "prompt"
    kept_name: str | None = None
    """What the file was called when the run started: ids key the random draws, so a renamed file keeps them."""
    local: Path | None = None
    """Where the file is, when it was fetched."""

    @property
    def name(self) -> str:
        """The file's stem: the first part of its prompts' ids."""
        return self.kept_name or Path(self.uri.split("://", 1)[-1]).stem


def load_rows(source: PromptSource) -> tuple[list[Mapping[str, Any]], str]:
    """All rows of a source, each with a usable prompt, and the SHA-256 of the file's bytes.

    Raises:
        DataError: the file is missing, empty or not UTF-8, or has broken rows: up to five are named by line, the rest
        counted.
    """
    path = source.local or resolve_path(source.uri)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"the prompts file does not exist: {path.absolute()}",
            where=source.uri,
            fix="correct spec.data.prompts[].uri",
        ) from None
    except (IsADirectoryError, PermissionError) as error:
        raise DataError(f"the prompts file cannot be read: {error.strerror}", where=source.uri) from None
    if not raw.strip():
        raise DataError("the prompts file is empty", where=source.uri, fix="give it at least one row with a prompt")
    read = {"Parquet": _parquet_rows, "CSV": _csv_rows}.get(_resolve_format(source, path), _jsonl_rows)
    rows = read(raw, source)
    if not rows:
        raise DataError("the prompts file has no rows", where=source.uri, fix="give it at least one row with a prompt")
    return rows, hashlib.sha256(raw).hexdigest()


def resolve_path(uri: str) -> Path:
    """The local file behind a URI."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return Path(uri)
    if scheme == "file":
        return Path(rest)
    if scheme == "builtin":
        if rest not in BUILTIN:
            raise DataError(f"no builtin prompts are called {rest!r}", where=uri, fix=f"one of: {', '.join(BUILTIN)}")
        return Path(__file__).parent / "builtin" / BUILTIN[rest]
    raise DataError(f"prompts cannot be read from {scheme}://", where=uri, fix="use a path, file:// or builtin://")


def _resolve_format(source: PromptSource, path: Path) -> Format:
    if source.format != "Auto":
        return source.format
    return {".parquet": "Parquet", ".pq": "Parquet", ".csv": "CSV"}.get(path.suffix, "JSONL")  # type: ignore[return-value]


def _jsonl_rows(raw: bytes, source: PromptSource) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    problems: list[str] = []
    # Split at \n only: str.splitlines would also split at U+2028, which JSON strings may hold.
    for number, line in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode(), parse_constant=_refuse_constant)
        except UnicodeDecodeError as error:
            problems.append(
                f"line {number}: not UTF-8 (byte {error.start + 1} of the line is 0x{line[error.start]:02x})"
            )
            continue
        except ValueError as error:
            message = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            problems.append(f"line {number}: not JSON: {message}: {_excerpt(line)}")
            continue
        problem = row_problem(row, source.prompt_field)
        if problem:
            problems.append(f"line {number}: {problem}")
        else:
            rows.append(row)
    _check_problems(problems, source)
    return rows


def _csv_rows(raw: bytes, source: PromptSource) -> list[Mapping[str, Any]]:
    """With a header, RFC 4180: every cell is text as it stands, `=1+1` and `007` among them. An empty line is none."""
    try:
        text = raw.removeprefix(b"\xef\xbb\xbf").decode()
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise DataError(f"line {line}: not UTF-8", where=source.uri, fix="save the file as UTF-8") from None
    csv.field_size_limit(MAX_CELL)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[Mapping[str, Any]] = []
    problems: list[str] = []
    try:
        header = next(reader)
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise DataError(f"the header names {twice[0]!r} more than once", where=source.uri, fix="rename one of them")
        for cells in reader:
            if not cells:
                continue
            row = dict(zip(header, cells, strict=False))
            problem = row_problem(row, source.prompt_field)
            if len(cells) != len(header):
                problem = f"{len(cells)} cells, the header has {len(header)}"
            if problem:
                problems.append(f"line {reader.line_num}: {problem}")
            else:
                rows.append(row)
    except csv.Error as error:
        raise DataError(
            f"line {reader.line_num}: not CSV: {error}", where=source.uri, fix="quote cells as RFC 4180 does"
        ) from None
    _check_problems(problems, source, "one row of cells a line, below a header that has the prompt's column")
    return rows


def _parquet_rows(raw: bytes, source: PromptSource) -> list[Mapping[str, Any]]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            "reading Parquet needs pyarrow, which is not installed",
            where=source.uri,
            fix="install orbit-rl[train], or convert the file to JSONL",
        ) from None
    try:
        rows = parquet.read_table(pyarrow.BufferReader(raw)).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"not a Parquet file: {str(error).splitlines()[0]}", where=source.uri) from None
    problems = []
    for number, row in enumerate(rows, start=1):
        problem = row_problem(row, source.prompt_field) or _json_problem(row)
        if problem:
            problems.append(f"row {number}: {problem}")
    _check_problems(problems, source)
    return list(rows)


def row_problem(row: Any, prompt_field: str) -> str | None:
    """What keeps this row from being a prompt, or `None`."""
    if not isinstance(row, dict):
        return f"a row is a JSON object, this is {_kind(row)}"
    if prompt_field not in row:
        return f"no key {prompt_field!r}; the row has: {', '.join(map(repr, row)) or 'no keys'}"
    prompt = row[prompt_field]
    if isinstance(prompt, str):
        return None if prompt.strip() else f"{prompt_field!r} is empty"
    if not isinstance(prompt, list):
        return f"{prompt_field!r} is a string or a list of chat messages, this is {_kind(prompt)}"
    if not prompt:
        return f"{prompt_field!r} is an empty list"
    for index, message in enumerate(prompt):
        if not isinstance(message, dict):
            return f"{prompt_field}[{index}] is a message with 'role' and 'content', this is {_kind(message)}"
        where = f"{prompt_field}[{index}]"
        if not isinstance(message.get("role"), str):
            return f"{where}.role is a string, this is {_kind(message.get('role'))}"
        problem = _content_problem(message, where)
        if problem:
            return problem
    return None


def _content_problem(message: Mapping[str, Any], where: str) -> str | None:
    """Text, a list of parts, or nothing beside calls of tools."""
    content, calls = message.get("content"), message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        return f"{where}.tool_calls is a list of objects, this is {_kind(calls)}"
    if content is None and calls:
        return None
    if isinstance(content, list):
        for index, part in enumerate(content):
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                return f"{where}.content[{index}] is a part with a 'type', this is {_kind(part)}"
        return None
    return None if isinstance(content, str) else f"{where}.content is a string, this is {_kind(content)}"


def _json_problem(row: Mapping[str, Any]) -> str | None:
    """Rewards run in other processes and receive the columns as JSON."""
    for key, value in row.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            return f"column {key!r} holds {_kind(value)}, which JSON cannot hold; drop or convert the column"
    return None


def _check_problems(
    problems: list[str], source: PromptSource, fix: str = "one JSON object a line, each with the prompt's key"
) -> None:
    if not problems:
        return
    count = "1 broken row" if len(problems) == 1 else f"{len(problems)} broken rows"
    raise DataError(f"{count}:\n{listed(problems)}", where=source.uri, fix=fix)


def listed(problems: Sequence[str]) -> str:
    """The first of them, a line each, and how many more there are."""
    more = f"\n  and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
    return "\n".join(f"  {problem}" for problem in problems[:MAX_LISTED]) + more


def _refuse_constant(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _excerpt(line: bytes) -> str:
    text = line.decode(errors="replace").strip()
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "a number"
    return names.get(type(value), f"a {type(value).__name__}")
