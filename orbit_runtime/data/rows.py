"""A source of rows: a file, a folder of files, or a folder saved by `datasets`; checked completely before a run starts.

Belongs here: URIs, and which files a source has. Does not belong here: file formats (`readers`), order and cursor
(`prompts`).
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from orbit_runtime.data.readers import COMPRESSED, SUFFIXES, Format, format_of, read_file
from orbit_runtime.data.scan import Columns, Scan
from orbit_runtime.data.stores import RowStore, Shards
from orbit_runtime.errors import DataError
from orbit_runtime.model_info.settings import open_regular

BUILTIN = {
    name: f"{name}.jsonl"
    for name in ("small-functions", "sums-of-99", "two-digit-addition", "two-digit-multiplication")
}
SPLITS, STATE = "dataset_dict.json", "state.json"
"""Files of `datasets`: `DatasetDict.save_to_disk` writes the first, `Dataset.save_to_disk` the second."""
MAX_FILES = 100_000


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
    """The file's name when the run started: ids key the random draws, so they survive renaming the file."""
    local: Path | None = None
    """Local path of the file or folder, if it was fetched."""
    field: str | None = "spec.data.prompts"
    """The manifest's field that names it; None if a command's argument does."""

    @property
    def name(self) -> str:
        """The file's stem: the first part of its prompts' ids."""
        return self.kept_name or source_name(self.uri)


@dataclass(frozen=True, slots=True)
class OpenedSource:
    """A source of which every row was checked."""

    store: RowStore
    digest: str
    """SHA-256 of the file's bytes; for several files, of all their digests in order."""
    columns: Columns


def source_name(uri: str) -> str:
    """Example: `train` of `s3://data/train.jsonl.gz`"""
    path = Path(uri.split("://", 1)[-1])
    return Path(path.stem).stem if path.suffix in COMPRESSED else path.stem


def open_rows(source: PromptSource, counted: int | None = None, *, prompts: bool = True) -> OpenedSource:
    """Reads every row of a source once, and keeps their places.

    Args:
        counted: number of rows that are used, and whose columns therefore matter; None for all.
        prompts: whether every row must have a prompt.

    Raises:
        DataError: the file is missing, empty or not UTF-8, or has broken rows: up to five are named by line, the rest
        counted.
    """
    path = source.local or resolve_path(source.uri)
    files, asked = _files(path, source)
    columns = Columns()
    stores, digests = [], []
    for each in files:
        where = source.uri if each == path else f"{source.uri}, {each.relative_to(path)}"
        scan = Scan(source.prompt_field if prompts else None, columns, counted)
        store, digest = _open_file(each, where, source.field, asked, scan)
        stores.append(store)
        digests.append(digest)
    if len(stores) == 1:
        return OpenedSource(stores[0], digests[0], columns)
    whole = hashlib.sha256("\n".join(digests).encode()).hexdigest()
    return OpenedSource(Shards(stores, [str(each.relative_to(path)) for each in files]), whole, columns)


def _open_file(path: Path, where: str, field: str | None, asked: Format, scan: Scan) -> tuple[RowStore, str]:
    try:
        file = open_regular(path)
        size, digest = file.seek(0, io.SEEK_END), ""
        if size:
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise DataError(
            f"the prompts file does not exist{'' if str(path) == where else f': {path.absolute()}'}",
            where=where,
            fix=f"correct the address in {field}; a path is relative to the manifest's folder"
            if field
            else "check the path, which is relative to this folder",
        ) from None
    except OSError as error:
        raise DataError(
            f"the prompts file cannot be read: {error.strerror}", where=where, fix="make it readable for this user"
        ) from None
    if not size:
        raise DataError("the prompts file is empty", where=where, fix="give it at least one row with a prompt")
    file.seek(0)
    return read_file(path, file, asked, scan, where), digest


def resolve_path(uri: str) -> Path:
    """The local file of a URI."""
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


def needs_arrow(source: PromptSource) -> bool:
    """Whether pyarrow reads the source; a broken source is reported when it is opened."""
    if source.format != "Auto":
        return source.format in ("Parquet", "Arrow")
    path = source.local or resolve_path(source.uri)
    if not path.is_dir():
        return format_of(path) in ("Parquet", "Arrow")
    files, asked = _files(path, source)
    return asked == "Arrow" or any(format_of(each) in ("Parquet", "Arrow") for each in files)


def _files(path: Path, source: PromptSource) -> tuple[Sequence[Path], Format]:
    """The files of a source in order, and their format."""
    if not path.is_dir():
        return [path], source.format
    if (path / SPLITS).is_file():
        splits = _read_names(path / SPLITS, "splits", source.uri)
        raise DataError(
            f"this folder holds several splits: {', '.join(splits)}",
            where=source.uri,
            fix=f"name one of them: {source.uri.rstrip('/')}/{splits[0] if splits else 'train'}",
        )
    if (path / STATE).is_file():
        return [path / name for name in _read_names(path / STATE, "_data_files", source.uri)], "Arrow"
    wanted = [suffix for suffix, kind in SUFFIXES.items() if source.format in ("Auto", kind)]
    named = (
        each for each in _named_files(path)
        if format_of(each) is not None and each.is_file()
        and (source.format == "Auto" or format_of(each) == source.format)
    )  # fmt: skip
    # A folder that holds something else may hold a disk's worth of it.
    found = sorted(itertools.islice(named, MAX_FILES + 1))
    kinds = sorted({str(format_of(each)) for each in found})
    if not found or len(found) > MAX_FILES:
        count = f"more than {MAX_FILES}" if found else "no"
        raise DataError(
            f"by their names, {count} files in this folder contain rows", where=source.uri,
            fix=f"files of one folder are read together: 1 to {MAX_FILES} that end in {', '.join(wanted)}",
        )  # fmt: skip
    if len(kinds) > 1:
        raise DataError(
            f"files of this folder are {' and '.join(kinds)}", where=source.uri,
            fix=f"name one kind in {source.field}[].format, or one file" if source.field else "name one file",
        )  # fmt: skip
    return found, source.format


def _named_files(path: Path) -> Iterator[Path]:
    """Files below a folder, without what is hidden: names that begin with `.` or `_`, and what such folders hold."""
    for folder, folders, files in path.walk():
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        yield from (folder / name for name in files if not name.startswith((".", "_")))


def _read_names(path: Path, key: str, where: str) -> list[str]:
    """File names or splits listed in a file of `datasets`."""
    try:
        read = json.loads(path.read_bytes())
        if read.get("_indices_files") or read.get("_indices_data_files"):
            raise DataError(
                "its rows are chosen by a file of indexes, as old versions of `datasets` saved them",
                where=where, fix="load it with `datasets`, and save it again",
            )  # fmt: skip
        names = [str(each["filename"] if isinstance(each, dict) else each) for each in read[key]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path.name} is not what `datasets` writes: {type(error).__name__} {error}", where=where,
            fix="save the dataset again, or name its Arrow files one by one",
        ) from None  # fmt: skip
    if any("/" in name or name.startswith(".") for name in names) or not names:
        raise DataError(f"{path.name} lists {names[:1] or 'nothing'}", where=where, fix="save the dataset again")
    return names
