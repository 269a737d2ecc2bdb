"""Files that are no rows at all, told by their first bytes: archives, pages, pointers.

Belongs here: recognising them, and what to do. Does not belong here: text in another encoding (`text_encoding`).
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import IO

from orbit_runtime.errors import DataError

_ROWS = "give the rows themselves as JSON lines, CSV or Parquet"
_KINDS: dict[bytes, tuple[str, str]] = {
    b"PK\x03\x04": ("a zip archive, as files of Excel are", _ROWS),
    b"BZh": ("packed by bzip2", "unpack it: bzip2 -dk {name}"),
    b"\xfd7zXZ": ("packed by xz", "unpack it: xz -dk {name}"),
    b"7z\xbc\xaf": ("a 7z archive", _ROWS),
    b"\x1f\x8b": ("packed by gzip, which its name does not say", "let its name end in .gz: {name}.gz"),
    b"\x28\xb5\x2f\xfd": ("packed by zstd, which its name does not say", "let its name end in .zst: {name}.zst"),
    b"PAR1": ("Parquet, which its name does not say", "write `format: Parquet` beside its uri"),
    b"ARROW1": ("Arrow, which its name does not say", "write `format: Arrow` beside its uri"),
    b"SQLite format 3": ("a database of SQLite", _ROWS),
    b"version https://git-lfs": ("a pointer of Git LFS and not the file itself", "fetch the file: git lfs pull"),
    b"<!doctype html": ("a web page", "fetch the file itself: its page was saved instead"),
    b"<html": ("a web page", "fetch the file itself: its page was saved instead"),
}
"""First bytes → what the file is, and what to do; none of them begins a row."""
_LONGEST = max(map(len, _KINDS))


def check_foreign(file: IO[bytes], path: Path, where: str) -> None:
    """Looks at the first bytes of a file of text, and stays at its beginning.

    Raises:
        DataError: (65) it is something else.
    """
    head = file.read(_LONGEST).lower()
    file.seek(0)
    for mark, (what, fix) in _KINDS.items():
        if head.startswith(mark.lower()):
            raise DataError(f"this is {what}", where=where, fix=fix.format(name=shlex.quote(path.name)))
