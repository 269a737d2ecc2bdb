"""What travels between the processes of a run arrives as it left, to the bit; anything else is refused."""

from __future__ import annotations

import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit_runtime.digests import Piece
from orbit_runtime.errors import DataError
from orbit_runtime.services.frames import pack, unpack
from orbit_runtime.types import Completion, Request, RoutedExperts, Sample, Sampling, Scored, UpdateResult

LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    LEAVES | st.lists(st.floats(width=32, allow_nan=False)).map(lambda each: array("f", each)),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(VALUES)
def test_plain_values_and_arrays_come_back_equal(value: object) -> None:
    assert unpack(pack(value)) == value


def test_records_come_back_equal_and_tuples_of_numbers_stay_tuples() -> None:
    completion = Completion(
        3, array("i", [5, 6]), array("f", [-0.1, -1e-30]), array("i", [0, 1]), "abort", "x",
        RoutedExperts((1, 2, 3), b"\x01\x02"),
    )  # fmt: skip
    records = [
        completion,
        Request(
            1, 2**64 - 1, tuple(range(100)), Sampling(stop=("a",), logit_bias=((3, 0.5),)), "policy-v1", completion
        ),
        Sample(array("i", [1]), array("b", [1]), {"sampled": array("f", [-0.5])}, 0, 0),
        Sample(
            array("i", [1]),
            array("b", [1]),
            {},
            0,
            0,
            teacher_top=(array("i", [2**31 - 1, 0]), array("f", [-1e-30, -17.25])),
        ),
        Scored(tuple(-float(each) for each in range(40)), "tree:1", top_T=tuple(range(40))),
        UpdateResult({"loss": 0.1, "kl": -0.0}, 2, 7),
        Piece(3, "ab"),
    ]
    assert unpack(pack(records)) == records


def test_numbers_that_are_none_and_zeros_with_a_sign_arrive() -> None:
    found = unpack(pack([float("nan"), float("-inf"), -0.0, array("f", [float("nan"), -0.0])]))
    assert math.isnan(found[0])
    assert found[1] == -math.inf
    assert math.copysign(1, found[2]) == -1
    assert found[3].tobytes() == array("f", [float("nan"), -0.0]).tobytes()


def test_bytes_are_views_that_are_not_copied() -> None:
    frame = pack({"part": b"x" * 1000})
    assert bytes(unpack(frame)["part"]) == b"x" * 1000
    assert unpack(frame)["part"].obj is frame


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"ORB1",
        b"nothing of the kind",
        pack({"a": array("f", [1.0] * 50)})[:-40],
        pack(1).replace(b"ORB1", b"ORB2"),
        b'ORB1\x24\x00\x00\x00{"tree":{"r":["Path",{}]},"sizes":[]}',
        b'ORB1\x22\x00\x00\x00{"tree":{"a":["f",7]},"sizes":[]}   ',
        b'ORB1\x21\x00\x00\x00{"tree":{"b":0},"sizes":[-8]}     ',
    ],
)
def test_what_is_no_frame_is_refused(damaged: bytes) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        unpack(damaged)
