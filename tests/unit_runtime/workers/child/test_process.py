"""Messages in a stream of bytes, however it arrives."""

from __future__ import annotations

import io

import pytest

from orbit_runtime.workers.child.process import Frames, Seal, frame, read_frame

BODIES = [b"a", b"", b"x" * 300]
STREAM = b"".join(map(frame, BODIES))


def test_a_frame_is_four_bytes_of_length_and_the_body() -> None:
    assert frame(b"abc") == b"\x00\x00\x00\x03abc"


@pytest.mark.parametrize("piece", [1, 3, 4, 7, len(STREAM)])
def test_bodies_come_out_whole_whatever_pieces_arrive(piece: int) -> None:
    frames = Frames()
    pieces = [STREAM[at : at + piece] for at in range(0, len(STREAM), piece)]
    assert [body for each in pieces for body in frames.feed(each)] == BODIES


def test_a_blocking_reader_gets_one_body_at_a_time_and_none_at_the_end() -> None:
    stream = io.BytesIO(STREAM + b"\x00\x00\x00\x05cut")
    assert [read_frame(stream.read) for _ in range(5)] == [*BODIES, None, None]


def test_a_seal_opens_what_its_other_end_closed_and_that_once_and_in_order() -> None:
    ours, theirs = Seal("key"), Seal("key")
    first, second = theirs.close(b"a b"), theirs.close(b"a b")
    assert first != second
    assert (ours.open(first), ours.open(second)) == (b"a b", b"a b")
    for written in (second, b"a b", b"", Seal("another").close(b"a b"), first.replace(b"a b", b"c")):
        with pytest.raises(ValueError, match="another"):
            Seal("key").open(written)
