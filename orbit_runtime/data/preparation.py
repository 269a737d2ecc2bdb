"""`orbit data prepare`: turns a file of a known shape into JSON lines for a run, with a manifest of their origin.

Belongs here: reading, dropping and writing rows, digests. Does not belong here: converting a row (`shapes`), fetching
(`storage.inputs`).

The manifest is written before the rows get their final name, so that named rows always have a manifest. Neither depends
on when or where it was made.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orbit_runtime.data.rows import OpenedSource, PromptSource, open_rows
from orbit_runtime.data.scan import listed
from orbit_runtime.data.shapes import RequestedShape, RowError, build_row
from orbit_runtime.errors import DataError, OutputError, StorageError

FORMAT = 1
SUFFIX = ".manifest.json"
TOLD = 1000
"""Rows between two reports of progress."""


@dataclass(frozen=True, slots=True)
class PreparationSettings:
    """Settings for preparing a source."""

    asked: RequestedShape
    limit: int | None = None
    """Most rows in the result."""
    deduplicate: bool = False
    """Whether to drop repeated questions, ignoring case and white space."""
    skip_broken: bool = False
    """Whether to count and drop rows that cannot be prepared, instead of raising an error."""

    def to_json(self) -> dict[str, Any]:
        shape = {
            name: [*value] if isinstance(value, tuple) else value for name, value in asdict(self.asked.shape).items()
        }
        return {
            "shape": shape,
            "seed": self.asked.seed,
            "shuffle": self.asked.shuffle,
            "limit": self.limit,
            "deduplicate": self.deduplicate,
            "skip_broken": self.skip_broken,
        }


@dataclass(frozen=True, slots=True)
class PreparedData:
    """A result, and whether it already existed."""

    manifest: Mapping[str, Any]
    is_new: bool


def prepare(
    source: PromptSource,
    target: Path,
    preparation: PreparationSettings,
    *,
    revision: str | None = None,
    force: bool = False,
    tell: Callable[[int, int], None] = lambda _done, _all: None,
) -> PreparedData:
    """Writes `target` and its manifest beside it; does nothing if both already exist.

    Args:
        revision: the commit of a source on a hub.
        force: replace the result of another preparation.
        tell: called with progress: rows done, total.

    Raises:
        DataError: the source cannot be read, or rows cannot be prepared: up to five are named, the rest counted.
        OutputError: the target holds something else, or its folder cannot be written.
        StorageError: the disk is full.
    """
    opened = open_rows(source, prompts=False)
    asked = {
        "source": {"uri": source.uri, "revision": revision, "sha256": opened.digest, "rows": len(opened.store)},
        "asked": preparation.to_json(),
    }
    before = _read_manifest(target)
    if before is not None and _is_there(target, before, asked):
        return PreparedData(before, is_new=False)
    if target.exists() and not force and not (before and all(before.get(key) == asked[key] for key in asked)):
        raise OutputError(
            "it holds another preparation" if before else "the file exists and is not a preparation",
            where=str(target),
            fix="write to another name, or replace it with --force",
        )
    part = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        counts, digest = _write(opened, source, part, preparation, tell)
        manifest = {
            "format": FORMAT,
            **asked,
            "result": {"sha256": digest, "bytes": part.stat().st_size, "rows": counts.pop("rows")},
            "left_out": dict(sorted(counts.items())),
        }
        _write_whole(manifest_path(target), json.dumps(manifest, indent=2) + "\n")
        os.replace(part, target)
    except PermissionError as error:
        raise OutputError(f"cannot be written: {error.strerror}", where=str(target)) from None
    except OSError as error:
        raise StorageError(f"cannot be written: {error.strerror}", where=str(target)) from None
    finally:
        part.unlink(missing_ok=True)
    return PreparedData(manifest, is_new=True)


def manifest_path(target: Path) -> Path:
    return target.with_name(target.name + SUFFIX)


def _write(
    opened: OpenedSource,
    source: PromptSource,
    part: Path,
    preparation: PreparationSettings,
    tell: Callable[[int, int], None],
) -> tuple[Counter[str], str]:
    """Returns counts, and the digest of what was written."""
    store, digest, counts = opened.store, hashlib.sha256(), Counter[str](rows=0)
    seen: set[bytes] = set()
    problems: list[str] = []
    with part.open("wb") as file:
        for number in range(len(store)):
            if number % TOLD == 0:
                tell(number, len(store))
            if preparation.limit is not None and counts["rows"] >= preparation.limit:
                break
            try:
                row = build_row(store.read(number), preparation.asked)
                line = _line(row)
            except RowError as error:
                counts["broken"] += 1
                if len(problems) < 5:
                    problems.append(f"{store.place(number)}: {error}")
                continue
            if preparation.deduplicate and _is_repeated(row["prompt"], seen):
                counts["repeated"] += 1
                continue
            digest.update(line)
            file.write(line)
            counts["rows"] += 1
        file.flush()
        os.fsync(file.fileno())
    tell(len(store), len(store))
    if problems and not preparation.skip_broken:
        raise DataError(
            f"{counts['broken']} of {len(store)} rows cannot be prepared:\n{listed(problems, counts['broken'])}",
            where=source.uri,
            fix="name the right columns (--prompt, --answer, --choices, --tests) or another --format, or leave such "
            "rows out with --skip-broken",
        )
    if not counts["rows"]:
        raise DataError("no row is left", where=source.uri, fix="look at --limit, --format and the columns")
    return counts, digest.hexdigest()


def _line(row: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        raise RowError("it holds half of a surrogate pair, which is not a character") from None


def _is_repeated(prompt: Any, seen: set[bytes]) -> bool:
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
    key = hashlib.blake2b(" ".join(text.casefold().split()).encode(), digest_size=16).digest()
    if key in seen:
        return True
    seen.add(key)
    return False


def _read_manifest(target: Path) -> dict[str, Any] | None:
    try:
        read = json.loads(manifest_path(target).read_bytes())
    except (OSError, ValueError):
        return None
    return read if isinstance(read, dict) and read.get("format") == FORMAT else None


def _is_there(target: Path, before: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """Whether the rows are those in the manifest, and the manifest is for the same preparation."""
    if any(before.get(key) != value for key, value in asked.items()) or not target.is_file():
        return False
    with target.open("rb") as file:
        return bool(hashlib.file_digest(file, "sha256").hexdigest() == before["result"]["sha256"])


def _write_whole(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
