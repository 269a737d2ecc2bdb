"""Micro-batches dealt to replicas: each once, and as many passes on every replica."""

from __future__ import annotations

import pytest

from orbit_runtime.training.micro_batches import deal


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
