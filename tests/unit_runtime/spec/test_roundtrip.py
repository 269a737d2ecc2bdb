"""Any run, written out and read back, is the same run."""

from __future__ import annotations

import io
import json
from copy import deepcopy
from functools import reduce
from typing import Any

from hypothesis import given, settings
from pydantic import ValidationError
from ruamel.yaml import YAML

from orbit_runtime.spec import OrbitRun, parse_manifest
from orbit_runtime.spec.run import find_contradictions
from tests.unit_runtime.spec.drawn_manifests import manifests


def without_contradictions(value: dict[str, Any]) -> OrbitRun | None:
    """The run, with what is impossible taken out, one after the other; `None` where that does not help."""
    for _ in range(12):
        run = OrbitRun.model_validate(value, by_name=False, context={"contradictions": "collect"})
        at = next((each.at for each in find_contradictions(run)), None)
        if at is None:
            return run
        if at[:3] == ("spec", "environment", "rewards") and len(at) > 3:
            value["spec"]["environment"]["rewards"][int(at[3])] = {"name": f"reward{at[3]}", "type": "Math"}
        elif not take_out(value, at):
            return None
    return None


def take_out(value: dict[str, Any], at: tuple[str | int, ...]) -> bool:
    """Removes what stands there; where a block cannot do without it, the block as well. False: nothing stands there."""
    for length in range(len(at), 0, -1):
        without = deepcopy(value)
        try:
            parent = reduce(lambda here, part: here[part], at[: length - 1], without)
            del parent[at[length - 1]]
            OrbitRun.model_validate(without, by_name=False, context={"contradictions": "collect"})
        except (KeyError, IndexError, TypeError, ValidationError):
            continue
        value.clear()
        value.update(without)
        return True
    return False


@settings(max_examples=60)
@given(manifests())
def test_a_run_that_is_written_out_reads_back_the_same(value: dict[str, Any]) -> None:
    run = without_contradictions(value)
    if run is None:
        return
    written = run.to_manifest()
    assert OrbitRun.model_validate(json.loads(json.dumps(written)), by_name=False) == run
    text = json.dumps(written)
    assert parse_manifest(text, name="x", environ={}) == run


def test_a_run_written_as_block_style_yaml_reads_back_the_same() -> None:
    value = {
        "apiVersion": "orbitrl.dev/v1alpha1",
        "kind": "OrbitRun",
        "metadata": {"name": "x", "labels": {"a": "010", "b": "on"}},
        "spec": {
            "model": {"uri": "1:30"},
            "data": {"prompts": [{"uri": "1_000"}]},
            "environment": {
                "rewards": [{"name": "a", "type": "Math", "arguments": {"x": [1, 2.5, None, {"y": True}]}}]
            },
            "training": {"steps": 3, "learningRate": 1e-5},
        },
    }
    run = OrbitRun.model_validate(value)
    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 1)
    yaml.default_flow_style = False
    text = io.StringIO()
    yaml.dump(run.to_manifest(), text)
    # The writer quotes what YAML 1.1 would misread; its `%YAML 1.1` line is not part of the manifest.
    body = text.getvalue().split("---\n", 1)[-1]
    assert parse_manifest(body, name="x", environ={}) == run
