"""The tree of digests against a slow twin that hashes one piece after the other, and what must change it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit_runtime.digests import (
    PIECE_BYTES,
    Piece,
    PieceHasher,
    cut,
    first_difference,
    hash_pieces,
    split,
    tree_digest,
)

FILES = st.dictionaries(st.text("abc/", min_size=1), st.lists(st.binary(max_size=40)), max_size=3)


def twin(files: dict[str, list[bytes]]) -> str:
    text = "orbit-tree-1\n"
    for name, pieces in sorted(files.items()):
        text += name + "\n"
        for piece in pieces:
            text += f"{len(piece)} {hashlib.sha256(piece).hexdigest()}\n"
    return "tree:" + hashlib.sha256(text.encode()).hexdigest()


@given(FILES)
def test_the_digest_is_that_of_the_text_in_the_documentation(files: dict[str, list[bytes]]) -> None:
    assert tree_digest({name: hash_pieces(pieces) for name, pieces in files.items()}) == twin(files)


@given(FILES, FILES)
def test_other_files_have_another_digest(one: dict[str, list[bytes]], other: dict[str, list[bytes]]) -> None:
    digests = [tree_digest({name: hash_pieces(pieces) for name, pieces in files.items()}) for files in (one, other)]
    assert (digests[0] == digests[1]) == (one == other)


def test_many_large_pieces_come_back_in_their_order_whatever_thread_was_done_first() -> None:
    sizes = [3 << 20, 5, PIECE_BYTES, 70_000, 0, 9 << 20, 65_536] * 3
    data = [bytes([number]) * size for number, size in enumerate(sizes)]
    assert hash_pieces(data) == tuple(Piece(len(each), hashlib.sha256(each).hexdigest()) for each in data)


def test_a_producer_is_held_back_while_much_waits_to_be_hashed() -> None:
    """So that no more than a few pieces are alive, however fast they are made."""
    alive: set[int] = set()
    most = 0

    class Block(bytearray):
        def __del__(self) -> None:
            alive.discard(id(self))

    def blocks() -> Iterator[Block]:
        nonlocal most
        for _ in range(40):
            block = Block(8 << 20)
            alive.add(id(block))
            most = max(most, len(alive))
            yield block

    hasher = PieceHasher()
    for block in blocks():
        hasher.add(block)
    assert len(hasher.result()) == 40
    # Four that wait, the one at hand, and one between the two loops; a thread may hold one that it has just done.
    assert most <= 7, "pieces pile up"


def test_cutting_begins_anew_at_every_part() -> None:
    sizes = [10, PIECE_BYTES, 0, PIECE_BYTES + 1, 3]
    data = os.urandom(sum(sizes))
    pieces = [*cut(data, sizes)]
    assert [len(each) for each in pieces] == [10, PIECE_BYTES, PIECE_BYTES, 1, 3]
    assert b"".join(pieces) == data
    assert [*split(data, hash_pieces(pieces))] == pieces


@pytest.mark.parametrize("at", [0, 9, 10, PIECE_BYTES + 9, PIECE_BYTES + 10, -1])
def test_one_changed_byte_is_found_in_its_piece(at: int) -> None:
    sizes = [10, PIECE_BYTES, 100_000]
    data = bytearray(os.urandom(sum(sizes)))
    pieces = hash_pieces(cut(data, sizes))
    assert first_difference(data, pieces) is None
    data[at] ^= 1
    position = at % len(data)
    ends = [0, 10, 10 + PIECE_BYTES, len(data)]
    assert first_difference(data, pieces) == next(n for n, (a, b) in enumerate(pairwise(ends)) if a <= position < b)


def test_bytes_too_few_or_too_many_are_a_difference() -> None:
    pieces = hash_pieces([b"abc"])
    assert first_difference(b"ab", pieces) == 0
    assert first_difference(b"abcd", pieces) == 0
