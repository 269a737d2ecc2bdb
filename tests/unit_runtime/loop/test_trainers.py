"""Which GPU each rank is told to see."""

from __future__ import annotations

import pytest

from orbit_runtime.loop.trainers import visible_gpus


@pytest.mark.parametrize(
    ("shown", "found"),
    [
        (None, ("1", "2")),
        ("", ("1", "2")),
        ("4,5,6,7", ("5", "6")),
        ("GPU-aa, GPU-bb, GPU-cc", ("GPU-bb", "GPU-cc")),
    ],
)
def test_ranks_see_the_gpus_that_the_run_was_given(shown: str | None, found: tuple[str, ...]) -> None:
    environment = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    assert visible_gpus((1, 2), environment) == found
