"""The same manifest at the API server and at `orbit validate`: accepted by both, or refused for the same fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.cluster.corpus import ANY, EXAMPLES, Case, hand_written
from tests.cluster.crd_api import RunsApi
from tests.cluster.field_cases import field_cases
from tests.unit_runtime.spec.drawn_manifests import manifests
from tests.unit_runtime.spec.test_corpus import blamed_fields

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


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(manifests())
def test_both_doors_blame_the_same_fields_of_any_manifest(runs_api: RunsApi, value: dict[str, Any]) -> None:
    """Each field allowed by itself; what they say together is checked by Python at one door and by CEL at the other."""
    value["metadata"].pop("namespace", None)
    # Free-form maps, which CEL cannot read: what is wrong with them, the loader and the operator say.
    value["spec"].get("rollout", {}).pop("engineArguments", None)
    value["spec"].get("placement", {}).pop("pod", None)
    for holder in (value["spec"], *value["spec"].get("evaluation", {}).get("environments", [])):
        holder.get("environment", {}).pop("arguments", None)
    text = json.dumps(value, ensure_ascii=False)
    answer = runs_api.create(text, dry_run=True)
    assert answer.fields == blamed_fields(text), answer.message
