"""Temporary memory: never two tensors in the same place, and pages that are used again."""

from __future__ import annotations

import pytest
import torch

from orbit_runtime.adapters.pages import KEPT_BYTES, SMALLEST_BYTES, Pages, room
from orbit_runtime.adapters.tensorfile import narrow_where_exact

LARGE = SMALLEST_BYTES // 4
"""fp32 values."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 1000, LARGE, 3 * LARGE + 1, KEPT_BYTES])
def test_a_room_has_its_size_and_keeps_what_is_written(size: int, dtype: torch.dtype) -> None:
    pages = Pages()
    for made in (room(size, dtype), pages.room(size, dtype), pages.room(size, dtype)):
        assert made.shape == (size,)
        assert made.dtype == dtype
        made.fill_(3.0)
        assert bool((made == 3.0).all())


def test_pages_are_used_again_once_no_view_of_them_is_left() -> None:
    pages = Pages()
    first = pages.room(2 * LARGE, torch.float32)
    place = first.data_ptr()
    view = first.view(2, LARGE)[1:]
    del first
    assert pages.room(LARGE, torch.float32).data_ptr() != place, "a view is left"
    held = memoryview(view.numpy())
    del view
    assert pages.room(LARGE, torch.float32).data_ptr() != place, "an array of the view is left"
    del held
    assert pages.room(2 * LARGE, torch.bfloat16).data_ptr() == place


def test_tensors_that_are_there_at_the_same_time_share_no_pages() -> None:
    pages = Pages()
    made = [pages.room(LARGE + index, torch.float32).fill_(index) for index in range(5)]
    for index, tensor in enumerate(made):
        assert bool((tensor == index).all())


def bits(values: torch.Tensor) -> list[int]:
    size = {2: torch.int16, 4: torch.int32}[values.element_size()]
    return list(values.view(size).tolist())


def test_narrowing_is_exact_or_not_done_for_every_kind_of_value() -> None:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    narrow = halves.view(torch.bfloat16)
    # Widened by their bits: zeros of both signs, subnormals, infinities, every NaN.
    wide = (halves.to(torch.int32) << 16).view(torch.float32)
    assert bits(narrow_where_exact(wide)) == bits(narrow)
    for place in (0, 7, len(wide) - 1):
        spoilt = wide.clone()
        spoilt.view(torch.int32)[place] |= 1
        kept = narrow_where_exact(spoilt)
        assert kept.dtype == torch.float32
        assert bits(kept) == bits(spoilt)
    assert narrow_where_exact(torch.empty(0)).dtype == torch.bfloat16
