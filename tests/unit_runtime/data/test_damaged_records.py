"""Files of rollouts that were damaged after they were written."""

from __future__ import annotations

import pytest
import zstandard

from orbit_runtime.data.records import decompress_rollouts, decompressed_lines
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
