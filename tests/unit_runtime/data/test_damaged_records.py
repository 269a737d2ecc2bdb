"""Files of rollouts that were damaged after they were written."""

from __future__ import annotations

import io

import pytest
import zstandard

from orbit_runtime.data.records import decompress_rollouts, decompressed_lines, unpacked
from orbit_runtime.errors import DataError

LINES = b"".join(b'{"number": %d}\n' % number for number in range(20_000))


@pytest.mark.parametrize("share", [0.01, 0.5, 0.999])
def test_a_file_that_is_cut_off_is_never_taken_for_a_shorter_one(share: float) -> None:
    whole = zstandard.ZstdCompressor(level=3).compress(LINES)
    assert b"\n".join(decompressed_lines(whole)) + b"\n" == LINES
    cut = whole[: int(len(whole) * share)]
    with pytest.raises((ValueError, zstandard.ZstdError), match=r"cut off after|destination buffer|Src size|corrupt"):
        list(decompressed_lines(cut))
    with pytest.raises(DataError, match="the file of rollouts is damaged") as caught:
        decompress_rollouts(cut, where="runs/a/rollouts/step-000002.jsonl.zst")
    assert (caught.value.exit_code, caught.value.where) == (65, "runs/a/rollouts/step-000002.jsonl.zst")
    assert "restore the file" in str(caught.value.fix)


def test_a_file_of_frames_that_was_flushed_at_line_ends_is_cut_off_as_well() -> None:
    """Other programs write such files; what is left of one ends with a whole line."""
    whole = flushed(LINES)
    skipped = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    assert b"".join(unpacked([whole[:7], whole[7:], skipped, whole])) == LINES * 2
    for length in (len(whole) // 2, len(whole) - 1):
        with pytest.raises(zstandard.ZstdError, match=r"cut off after \d+ unpacked bytes"):
            list(decompressed_lines(whole[:length]))


def flushed(lines: bytes) -> bytes:
    made = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(made, closefd=False) as writer:
        for line in lines.splitlines(keepends=True):
            writer.write(line)
            writer.flush()
    return made.getvalue()
