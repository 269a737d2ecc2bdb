"""Micro-batches dealt to replicas: each once, and as many passes on every replica."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from orbit_runtime.data.routing import pack_experts
from orbit_runtime.errors import InternalError
from orbit_runtime.policy.packed import build_packed
from orbit_runtime.policy.routing import OWN_CHOICE
from orbit_runtime.training.micro_batches import build_micro_batch, deal
from orbit_runtime.types import Sample, Sampling


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 8])
def test_every_micro_batch_counts_once_and_replicas_compute_equally_many(count: int, replicas: int) -> None:
    dealt = [deal(count, (place, replicas)) for place in range(replicas)]
    assert sorted(number for each in dealt for number, counts in each if counts) == list(range(count))
    assert {len(each) for each in dealt} == {-(-count // replicas)}
    for each in dealt:
        numbers = [number for number, _ in each]
        assert len(set(numbers)) == len(numbers), "a number is one micro-batch of a replica"
        assert all(0 <= number < count for number in numbers)


def test_one_replica_computes_all_in_their_order() -> None:
    assert deal(3, (0, 1)) == [(0, True), (1, True), (2, True)]


def test_what_was_given_after_the_last_answer_goes_where_the_routers_choose() -> None:
    """A limit ended the episode when a tool had answered: no engine has read that answer."""
    device, chosen_TLC = torch.device("cpu"), np.arange(4 * 3 * 2, dtype=np.int16).reshape(4, 3, 2)

    def routed(mask_T: list[int]) -> torch.Tensor | None:
        sample = Sample([7] * 8, mask_T, {}, 0, 2, pack_experts(chosen_TLC))  # type: ignore[arg-type]
        pack = partial(build_packed, device=device)
        return build_micro_batch([sample], [1.0], pack, Sampling(), device).routed_tokens()

    laid_out_TLC = routed([0, 0, 1, 1, 1, 0, 0, 0])
    assert laid_out_TLC is not None
    assert np.array_equal(laid_out_TLC[:4].numpy(), chosen_TLC)
    assert laid_out_TLC.shape == (7, 3, 2)
    assert bool((laid_out_TLC[4:] == OWN_CHOICE).all())
    with pytest.raises(InternalError, match="experts of 4 tokens for 7 inputs"):
        routed([0, 0, 1, 1, 1, 0, 1, 0])
