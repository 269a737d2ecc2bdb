"""A model divided among ranks has one process's log-probs and gradients: a selection of `matrix`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from tests.megatron.matrix import DIVISIONS, check, pairwise
from tests.megatron.ranks import World, world
from tests.models.family_matrix import Case

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
    assert all(isinstance(case, Case) for case in CHOSEN[division])
