"""Files of rows: one pass checks every row of a file, and returns a store that can read any row again.

Belongs here: JSON lines, CSV, Parquet and Arrow, plain or compressed, a file at a time; recognising files that are no
rows at all, or text that is not UTF-8, with what to do. Does not belong here: which files a source has (`rows`), what a
row must hold (`scan`).

JSON lines and Arrow are read in place. CSV and compressed files, which cannot be read from the middle, are written
again as JSON lines: into memory while short, then into an unnamed file in the system's temporary folder, which
disappears with the process.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import shlex
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

import zstandard

from orbit_runtime.data.records import unpacked
from orbit_runtime.data.scan import MAX_ROW, Scan, as_json
from orbit_runtime.data.stores import Batches, Lines, RowStore, UnchangedFile, without_nulls
from orbit_runtime.errors import DataError, StorageError

Format = Literal["Auto", "JSONL", "CSV", "Parquet", "Arrow"]

IN_MEMORY = 1 << 26
"""Largest file, in bytes, that is read whole, so that later writes to it change nothing."""
MAX_GROUP = 1 << 31
"""Most bytes of a decoded row group, all of which must be decoded to read one row."""
TABLE_FIX = "a table whose column of prompts holds text or lists of messages in every row"
MAX_LISTED_BYTES = 1 << 28
"""Most bytes of a file that is a single JSON list, which must be read whole."""
DECODED_ROWS = 512
"""Rows of a batch decoded at once."""
SUFFIXES: dict[str, Format] = {
    ".jsonl": "JSONL",
    ".ndjson": "JSONL",
    ".csv": "CSV",
    ".parquet": "Parquet",
    ".pq": "Parquet",
    ".arrow": "Arrow",
    ".feather": "Arrow",
}
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
BOM = b"\xef\xbb\xbf"


def format_of(path: Path) -> Format | None:
    """The format by file extension, ignoring `.gz` and `.zst`; None if the extension is unknown."""
    suffixes = [each for each in path.suffixes if each not in COMPRESSED]
    return SUFFIXES.get(suffixes[-1].lower()) if suffixes else None


def read_file(path: Path, file: IO[bytes], asked: Format, scan: Scan, where: str) -> RowStore:
    """Reads and checks every row of an open file.

    Raises:
        DataError: the file is broken or empty, or has broken rows: up to five are named by line, the rest counted.
        StorageError: the temporary folder is full.
    """
    kind = format_of(path) or "JSONL" if asked == "Auto" else asked
    packed = COMPRESSED.get(path.suffix)
    if kind in ("Parquet", "Arrow"):
        if packed:
            raise DataError(
                f"{kind} in {packed} cannot be read from the middle", where=where, fix="unpack it: it is compressed "
                "inside",
            )  # fmt: skip
        return (_read_parquet if kind == "Parquet" else _read_arrow)(path, file, scan, where)
    if not packed:
        check_foreign(file, path, where)
        check_encoding(file, path, where)
    if kind == "JSONL" and path.suffix == ".json" and (listed := _listed_rows(file, path, where)) is not None:
        return _scan_lines(listed, path, scan, where, None)
    if kind == "JSONL" and not packed:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        unchanged = UnchangedFile(file, where) if size > IN_MEMORY else None
        return _scan_lines(file if unchanged else io.BytesIO(file.read()), path, scan, where, unchanged)
    with _spooled(where) as spool, _unpacked(file, packed, where) as plain:
        if kind == "CSV":
            return _scan_csv(plain, path, spool, scan, where)
        while piece := plain.read(1 << 20):
            spool.write(piece)
        spool.seek(0)
        check_encoding(spool, path, where)
        listed = _listed_rows(spool, path, where) if path.suffixes[-2:-1] == [".json"] else None
        return _scan_lines(listed or spool, path, scan, where, None)


def _scan_lines(file: IO[bytes], path: Path, scan: Scan, where: str, unchanged: UnchangedFile | None) -> Lines:
    offset = len(BOM) if file.read(len(BOM)) == BOM else 0
    file.seek(offset)
    number = 0
    # Split at \n only: str.splitlines would also split at U+2028, which JSON strings may hold.
    while line := file.readline(MAX_ROW + 1):
        number += 1
        if len(line) > MAX_ROW:
            raise _too_long(number, len(line) + _rest_of_line(file), where, "write one JSON object a line")
        if not line.isspace():
            _scan_line(line, path, scan, number, offset)
        offset += len(line)
    if not number or (not scan.count and not scan.num_problems):
        raise DataError("the prompts file is empty", where=where, fix="give it at least one row with a prompt")
    scan.check(where)
    return Lines(
        file, count=scan.count, offsets=scan.offsets, lines=scan.lines, longest=scan.longest, unchanged=unchanged
    )


def _rest_of_line(file: IO[bytes]) -> int:
    """Bytes up to the end of the line, read a piece at a time."""
    size = 0
    while piece := file.readline(1 << 20):
        size += len(piece)
        if piece.endswith(b"\n"):
            break
    return size


def _too_long(number: int, size: int, where: str, form: str) -> DataError:
    return DataError(
        f"line {number} is longer than {MAX_ROW >> 20} MiB, which is the limit: it has {size:,} bytes",
        where=where,
        fix=f"{form}; what is that long does not belong in a row",
    )


def _listed_rows(file: IO[bytes], path: Path, where: str) -> IO[bytes] | None:
    """The rows of a `.json` file with one list, as lines; None if the file has lines."""
    head = file.read(64).removeprefix(BOM).lstrip()
    file.seek(0)
    if not head.startswith(b"["):
        return None
    raw = file.read(MAX_LISTED_BYTES + 1)
    if len(raw) > MAX_LISTED_BYTES:
        raise DataError(
            f"one list of JSON longer than {MAX_LISTED_BYTES >> 20} MiB",
            where=where,
            fix="write one JSON object a line",
        )
    try:
        rows = _JSON.decode(raw.decode("utf-8-sig"))
        return io.BytesIO(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        message = f"line {line}: not UTF-8 (byte {error.start + 1} of the file is 0x{raw[error.start]:02x})"
        raise DataError(message, where=where, fix=how_to_convert(path, "latin1")) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}", where=where, fix="write one list, or one JSON object a line") from None


def _scan_line(line: bytes, path: Path, scan: Scan, number: int, offset: int) -> None:
    at = f"line {number}"
    try:
        row = _JSON.decode(line.decode().rstrip("\r\n"))
    except UnicodeDecodeError as error:
        scan.refuse(
            f"{at}: not UTF-8 (byte {error.start + 1} of the line is 0x{line[error.start]:02x})",
            how_to_convert(path, "latin1"),
        )
    except json.JSONDecodeError as error:
        scan.refuse(f"{at}: not JSON: {error.msg} at column {error.pos + 1}: {_excerpt(line)}")
    except ValueError as error:
        scan.refuse(f"{at}: not JSON: {error}: {_excerpt(line)}")
    except RecursionError:
        scan.refuse(f"{at}: nested too deeply: {_excerpt(line)}")
    else:
        if scan.reads_prompts and _has_half_pair(line, row):
            scan.refuse(f"{at}: half of a surrogate pair, which is not a character: {_excerpt(line)}")
            return
        scan.add(row, len(line), at=at, line=number, offset=offset)


def _has_half_pair(line: bytes, row: Any) -> bool:
    r"""Whether text has a lone surrogate: valid in JSON (`\ud83d`), but not in UTF-8, nor for any tokenizer."""
    if b"\\ud" not in line and b"\\uD" not in line:
        return False
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _scan_csv(file: IO[bytes], path: Path, spool: IO[bytes], scan: Scan, where: str) -> Lines:
    """CSV with a header (RFC 4180): every cell is literal text, including `=1+1` and `007`. Empty lines are skipped."""
    csv.field_size_limit(MAX_ROW)
    reader = csv.reader(_text_lines(file, path, where), strict=True)
    offset = 0
    try:
        header = next(reader, None)
        if header is None:
            raise DataError("the prompts file is empty", where=where, fix="give it at least one row with a prompt")
        if len(header) == 1 and (mark := next((each for each in ";\t|" if each in header[0]), None)):
            raise DataError(
                f"line 1: one column, named {header[0]!r}", where=where,
                fix=f"separate cells by commas, and not by {mark!r}",
            )  # fmt: skip
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise DataError(f"the header names {twice[0]!r} more than once", where=where, fix="rename one of them")
        for cells in reader:
            if not cells:
                continue
            at = f"line {reader.line_num}"
            if len(cells) != len(header):
                scan.refuse(f"{at}: {len(cells)} cells, the header has {len(header)}")
                continue
            row = dict(zip(header, cells, strict=True))
            line = as_json(row).encode() + b"\n"
            scan.add(row, len(line), at=at, line=reader.line_num, offset=offset)
            offset += spool.write(line)
    except csv.Error as error:
        raise DataError(
            f"line {reader.line_num}: not CSV: {error}", where=where, fix="quote cells as RFC 4180 does"
        ) from None
    scan.check(where, "one row of cells a line, below a header that has the prompt's column")
    return Lines(
        spool, count=scan.count, offsets=scan.offsets, lines=scan.lines, longest=scan.longest, unit="row"
    )  # fmt: skip


def _text_lines(file: IO[bytes], path: Path, where: str) -> Iterator[str]:
    # Keep line ends as they are; bytes that are not UTF-8 are kept until their line can be named.
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    number = 0
    while line := text.readline(MAX_ROW):
        number += 1
        if len(line) == MAX_ROW:
            raise DataError(f"line {number} is longer than {MAX_ROW >> 20} MiB", where=where, fix="this is not CSV")
        try:
            line.encode()
        except UnicodeEncodeError:
            fix = how_to_convert(path, "latin1")
            raise DataError(f"line {number}: not UTF-8", where=where, fix=fix) from None
        yield line


def _read_parquet(path: Path, file: IO[bytes], scan: Scan, where: str) -> Batches:
    with _arrow(where, "Parquet"):
        from pyarrow import parquet  # type: ignore[import-untyped]

        opened = parquet.ParquetFile(file)
        groups = range(opened.num_row_groups)
        sizes = [opened.metadata.row_group(number).total_byte_size for number in groups]
        for number, size in enumerate(sizes):
            if size > MAX_GROUP:
                raise DataError(
                    f"row group {number} decodes to {size / 2**30:.1f} GiB, and a row cannot be read without all of it",
                    where=where,
                    fix="write smaller row groups, or make it JSON lines with `orbit data prepare`",
                )
        _scan_batches(opened.iter_batches(batch_size=DECODED_ROWS), scan)
        counts = [opened.metadata.row_group(number).num_rows for number in groups]
    scan.check(where, TABLE_FIX)
    return Batches(_loading(opened.read_row_group, where, "Parquet"), counts, scan.longest, UnchangedFile(file, where))


def _read_arrow(path: Path, file: IO[bytes], scan: Scan, where: str) -> Batches:
    """An Arrow file or stream (`datasets` writes streams), each batch decoded on reading. Never memory-mapped: a file
    that becomes shorter meanwhile would end the process by a signal."""
    with _arrow(where, "Arrow"):
        import pyarrow

        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        source = pyarrow.PythonFile(file, "r")
        if is_file:
            reader = pyarrow.ipc.open_file(source)
            load, number = reader.get_batch, reader.num_record_batches
        else:
            load, number = _stream_batches(source)

        def checked(index: int) -> Any:
            batch = load(index)
            # Offsets in a damaged file may point anywhere in memory.
            batch.validate(full=True)
            return batch

        counts: list[int] = []

        def pieces() -> Iterator[Any]:
            for batch in map(checked, range(number)):
                counts.append(batch.num_rows)
                yield from (batch.slice(start, DECODED_ROWS) for start in range(0, batch.num_rows, DECODED_ROWS))

        _scan_batches(pieces(), scan)
    scan.check(where, TABLE_FIX)
    return Batches(_loading(checked, where, "Arrow"), counts, scan.longest, UnchangedFile(file, where))


def _stream_batches(source: Any) -> tuple[Callable[[int], Any], int]:
    """What reads a batch of an Arrow stream by its number, and how many there are."""
    import pyarrow

    stream = pyarrow.ipc.open_stream(source)
    places, batches = [source.tell()], []
    # A dictionary stands between batches, so that none of these can be read alone.
    is_kept = any(pyarrow.types.is_dictionary(field.type) for field in stream.schema)
    for batch in stream:
        places.append(source.tell())
        batches += [batch] * is_kept

    def load(index: int) -> Any:
        source.seek(places[index])
        return pyarrow.ipc.read_record_batch(pyarrow.ipc.read_message(source), stream.schema)

    return (batches.__getitem__ if is_kept else load), len(places) - 1


def _scan_batches(batches: Iterator[Any], scan: Scan) -> None:
    number = 0
    for batch in batches:
        for each in batch.to_pylist():
            number += 1
            row = without_nulls(each)
            try:
                size = len(as_json(row))
            except ValueError as error:
                scan.refuse(f"row {number}: {error}")
                continue
            scan.add(row, size, at=f"row {number}")


def _loading(load: Callable[[int], Any], where: str, kind: str) -> Callable[[int], Any]:
    def loaded(number: int) -> Any:
        with _arrow(where, kind):
            return load(number)

    return loaded


@contextmanager
def _arrow(where: str, kind: str) -> Iterator[None]:
    """Turns what pyarrow raises about a file into an error of the file."""
    try:
        import pyarrow
    except ImportError:
        raise DataError(
            f"reading {kind} needs pyarrow, which is not installed",
            where=where,
            fix="pip install 'orbit-rl[data]', or convert the file to JSON lines",
        ) from None
    try:
        yield
    except (pyarrow.ArrowException, ArithmeticError, LookupError, OSError, SystemError, TypeError, ValueError) as error:
        message = f"not {kind} that can be read: {(str(error) or type(error).__name__).splitlines()[0]}"
        raise DataError(message, where=where, fix="fetch it, or write it, again: it is damaged or cut off") from None


@contextmanager
def _spooled(where: str) -> Iterator[IO[bytes]]:
    spool: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115
    try:
        yield spool
    except OSError as error:
        raise StorageError(
            f"its rows could not be written to {tempfile.gettempdir()}: {error.strerror}",
            where=where,
            fix="set TMPDIR to a folder with more room, or give the file as JSON lines, which are read in place",
        ) from None


@contextmanager
def _unpacked(file: IO[bytes], packed: str | None, where: str) -> Iterator[IO[bytes]]:
    if packed is None:
        yield file
        return
    try:
        if packed == "gzip":
            yield io.BufferedReader(gzip.GzipFile(fileobj=file))
        else:
            yield io.BufferedReader(_Pieces(unpacked(iter(partial(file.read, 1 << 20), b""))))
    except (gzip.BadGzipFile, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"not a {packed} file, or cut off: {error}", where=where, fix="fetch it again") from None


class _Pieces(io.RawIOBase):
    """A file of these pieces one after the other."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._held = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._held and (piece := next(self._pieces, None)) is not None:
            self._held = memoryview(piece)
        count = min(len(buffer), len(self._held))
        buffer[:count], self._held = self._held[:count], self._held[count:]
        return count


def _refuse_constant(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _without_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice in one object")
    return row


# Made once: `json.loads` with arguments would make one for each line.
_JSON = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_without_twice)


def _excerpt(line: bytes) -> str:
    text = line[:256].decode(errors="replace").strip()
    return repr(text if len(text) <= 60 else text[:57] + "...")


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
    """A command that turns a file into UTF-8, for an error's message."""
    reader = _UNPACK.get(path.suffix)
    plain = Path(path.stem) if reader else path
    source, to = shlex.quote(path.name), shlex.quote(f"{plain.stem}.utf8{plain.suffix}")
    convert = f"iconv -f {encoding} -t utf-8"
    command = f"{reader} {source} | {convert} > {to}" if reader else f"{convert} {source} > {to}"
    guess = "" if encoding.startswith("utf") else ", or the encoding that it really has instead of latin1"
    return f"convert it: {command}{guess}"
