"""A model divided among ranks has one process's log-probs and gradients: a selection of `matrix`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
import torch

from orbit_runtime.errors import UnsupportedError
from orbit_runtime.model_info.stages import stage_layers
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
def test_ranks_have_the_log_probs_and_gradients_of_one_process(ranks: tuple[str, World], root: Path) -> None:
    division, made = ranks
    for case in CHOSEN[division]:
        check(made, case, root)


@pytest.mark.timeout(600)
def test_in_bf16_ranks_are_no_further_from_one_process_than_rounding_is(ranks: tuple[str, World], root: Path) -> None:
    division, made = ranks
    check(made, CHOSEN[division][0], root, torch.bfloat16)


def test_more_stages_than_layers_are_refused_by_their_field() -> None:
    assert [len(stage_layers(61, stage, 4)) for stage in range(4)] == [16, 15, 15, 15]
    assert [stage_layers(5, stage, 2) for stage in range(2)] == [range(3), range(3, 5)]
    with pytest.raises(UnsupportedError, match="2 layers cannot be divided into 3 stages") as caught:
        stage_layers(2, 0, 3)
    assert caught.value.where == "spec.training.parallel.pipeline"
