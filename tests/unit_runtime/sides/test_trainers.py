"""What ranks are told to see, and what they need to be started."""

from __future__ import annotations

import pytest

from orbit_runtime.errors import UnsupportedError
from orbit_runtime.sides.trainers import check_rank_packages, visible_gpus


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


def test_all_that_ranks_lack_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orbit_runtime.sides.trainers.find_spec", lambda _: None)
    with pytest.raises(UnsupportedError, match="need megatron and ray") as caught:
        check_rank_packages()
    assert (caught.value.exit_code, caught.value.where) == (78, "spec.training.trainer")
    assert "orbit-rl[megatron,ray]" in str(caught.value.fix)
