"""What is wrong on purpose in one rank of a divided trainer: the error of that publish names rank, layer and tensor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.megatron.planted import CASES, Bench, Where, bench, sample, try_one


@pytest.fixture(scope="module")
def planted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(request.param, tmp_path_factory.mktemp("planted")) as made:
        yield made


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("planted", "side", "name", "where"),
    [(kind, *each) for kind in sorted(CASES) for each in sample(kind)],
    indirect=["planted"],
)
def test_a_fault_in_one_rank_is_named(planted: Bench, side: str, name: str, where: Where) -> None:
    assert try_one(planted, side, name, where) == ""
