"""The corpus that the API server is sent, at the other door: what `orbit validate` accepts, refuses and names."""

from __future__ import annotations

import pytest

from orbit_runtime.errors import ManifestError
from orbit_runtime.spec import parse_manifest
from tests.cluster.corpus import Case, hand_written
from tests.cluster.field_cases import field_cases

CASES = (*hand_written(), *field_cases())


def blamed_fields(text: str) -> tuple[str, ...]:
    """Every field that the loader names, as `spec.training.steps`; `("",)` for a file that is no manifest at all."""
    try:
        parse_manifest(text, name="x", environ={})
    except ManifestError as error:
        where = [(problem.where or "").partition(": ")[2] for problem in error.problems or (error,)]
        return tuple(sorted(set(where)))
    return ()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_loader_blames_the_fields_that_are_wrong(case: Case) -> None:
    assert blamed_fields(case.text) == case.refused
