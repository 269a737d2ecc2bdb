"""Experts that rollout chose: kept exactly, in few bytes, through the rollout's file."""

from __future__ import annotations

import numpy as np
import pytest

from orbit_runtime.data.records import compress_rollouts, decompress_rollouts
from orbit_runtime.data.routing import pack_experts, unpack_experts
from orbit_runtime.errors import DataError
from orbit_runtime.types import Rollout, RoutedExperts


def chosen(tokens: int, layers: int, per_token: int, experts: int) -> np.ndarray:
    """Without repetition, as a router chooses."""
    scores = np.random.default_rng(tokens).random((tokens, layers, experts))
    return scores.argsort(-1)[..., :per_token].astype(np.int16)


@pytest.mark.parametrize("shape", [(0, 3, 2), (1, 1, 1), (7, 3, 2), (300, 5, 8)])
@pytest.mark.parametrize("experts", [8, 256, 257, 384])
def test_every_id_comes_back(shape: tuple[int, int, int], experts: int) -> None:
    made = chosen(*shape, experts)
    routed = pack_experts(made)
    assert routed.shape == made.shape
    read = unpack_experts(routed)
    assert read.dtype == np.int16
    np.testing.assert_array_equal(read, made)


@pytest.mark.parametrize(("experts", "bits"), [(8, 3), (128, 7), (256, 8), (384, 9)])
def test_an_id_takes_the_bits_that_it_needs(experts: int, bits: int) -> None:
    assert len(pack_experts(chosen(200, 20, 8, experts)).data) == 200 * 20 * 8 * bits // 8


@pytest.mark.parametrize("data", [b"ab", b"abcdefg", pack_experts(chosen(5, 3, 2, 8)).data[:-1], bytes(16 * 4)])
def test_bytes_that_are_no_such_array_are_refused(data: bytes) -> None:
    with pytest.raises(DataError, match="bytes of experts"):
        unpack_experts(RoutedExperts((5, 3, 2), data))


@pytest.mark.parametrize("routed", [None, pack_experts(chosen(2, 3, 2, 384))])
def test_a_rollout_keeps_them_in_its_file(routed: RoutedExperts | None) -> None:
    made = Rollout(
        "run", 1, "p/0", 0, (), (1, 2, 3), (0, 1, 1), (0.0, -1.0, -2.0), (-1, 0, 0), 1.0, "value", {}, "stop", routed
    )
    assert decompress_rollouts(compress_rollouts([made])) == [made]
