"""A model divided among ranks has one process's log-probs and gradients: a selection of `matrix`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from orbit_runtime.errors import UnsupportedError
from orbit_runtime.training.megatron.groups import Sizes
from tests.megatron.matrix import DIVISIONS, check, pairwise
from tests.megatron.ranks import World, world

CHOSEN = {
    division: [each.case for each in group] for division, group in groupby(pairwise(), lambda each: each.division)
}


@pytest.fixture(scope="module", params=sorted(CHOSEN))
def ranks(request: pytest.FixtureRequest) -> Iterator[tuple[str, World]]:
    with world(DIVISIONS[request.param]) as made:
        yield request.param, made


@pytest.mark.timeout(600)
def test_ranks_have_the_log_probs_and_gradients_of_one_process(ranks: tuple[str, World], tmp_path: Path) -> None:
    division, made = ranks
    for number, case in enumerate(CHOSEN[division]):
        (tmp_path / str(number)).mkdir()
        check(made, case, tmp_path / str(number))


@pytest.mark.parametrize("axis", ["pipeline", "context"])
def test_what_is_not_divided_yet_is_refused_by_its_field(axis: str) -> None:
    with pytest.raises(UnsupportedError, match=f"by {axis}") as caught:
        Sizes(2, **{axis: 2}).check()
    assert caught.value.where == f"spec.training.parallel.{axis}"
