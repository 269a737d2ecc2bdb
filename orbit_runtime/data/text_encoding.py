"""Text of a file that is not UTF-8: which encoding it has, and how to convert it.

Belongs here: recognising, and the words. Does not belong here: reading rows (`readers`).
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import IO

from orbit_runtime.errors import DataError

HEAD_BYTES = 64
_MARKS = {
    b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16",
}  # fmt: skip
"""First bytes of a file → its encoding; the longer ones first."""
_UNPACK = {".gz": "gzip -dc", ".zst": "zstd -dc"}


def check_encoding(file: IO[bytes], path: Path, where: str) -> None:
    """Looks at the first bytes, and stays at the beginning of the file.

    Raises:
        DataError: (65) this is UTF-16 or UTF-32, with the command that converts it.
    """
    head = file.read(HEAD_BYTES)
    file.seek(0)
    found = next((name for mark, name in _MARKS.items() if head.startswith(mark)), None)
    if found is None and len(head) >= 2 and head[:2].count(0) == 1:
        # Without a mark: of an ASCII character, which rows begin with, one of two bytes is 0.
        found = "utf-16le" if head[1] == 0 else "utf-16be"
    if found is not None:
        message = f"line 1: this file is {found.upper()}, and only UTF-8 is read"
        raise DataError(message, where=where, fix=how_to_convert(path, found))


def how_to_convert(path: Path, encoding: str) -> str:
    """What makes UTF-8 of a file, for an error's message."""
    reader = _UNPACK.get(path.suffix)
    plain = Path(path.stem) if reader else path
    source, to = shlex.quote(path.name), shlex.quote(f"{plain.stem}.utf8{plain.suffix}")
    convert = f"iconv -f {encoding} -t utf-8"
    command = f"{reader} {source} | {convert} > {to}" if reader else f"{convert} {source} > {to}"
    guess = "" if encoding.startswith("utf") else ", or the encoding that it really has instead of latin1"
    return f"convert it: {command}{guess}"
