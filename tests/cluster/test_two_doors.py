"""The same manifest at the API server and at `orbit validate`: accepted by both, or refused for the same fields."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.corpus import ANY, EXAMPLES, Case, hand_written
from tests.cluster.crd_api import RunsApi
from tests.cluster.field_cases import field_cases

CASES = (*hand_written(), *field_cases())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_server_blames_the_fields_that_the_loader_blames(case: Case, runs_api: RunsApi) -> None:
    """What the loader says of each is in `unit_runtime/spec/test_corpus.py`, from the same table."""
    answer = runs_api.create(case.text, dry_run=True)
    assert (ANY if answer.fields and case.by_server == ANY else answer.fields) == case.by_server, answer.message


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_server_accepts_every_example(path: Path, runs_api: RunsApi) -> None:
    answer = runs_api.create(path.read_text(encoding="utf-8"), dry_run=True)
    assert answer.code == 201, answer.message
