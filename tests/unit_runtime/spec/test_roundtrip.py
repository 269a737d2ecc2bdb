"""Any run, written out and read back, is the same run."""

from __future__ import annotations

import io
import json
from typing import Any

from hypothesis import given, settings
from ruamel.yaml import YAML

from orbit_runtime.spec import OrbitRun, parse_manifest
from orbit_runtime.spec.run import find_contradictions
from tests.unit_runtime.spec.drawn_manifests import manifests


def without_contradictions(value: dict[str, Any]) -> OrbitRun | None:
    """The run, with what is impossible taken out; `None` where that does not help."""
    for _ in range(4):
        run = OrbitRun.model_validate(value, by_name=False, context={"contradictions": "collect"})
        found = list(find_contradictions(run))
        if not found:
            return run
        for each in found:
            here: Any = value
            for part in each.at[:-1]:
                here = here.get(part, {}) if isinstance(here, dict) else here[int(part)]
            if isinstance(here, dict) and each.at:
                here.pop(each.at[-1], None)
            if each.at[-1:] and isinstance(each.at[-1], int):
                here[each.at[-1]]["type"] = "Math"
        for index, reward in enumerate(value["spec"]["environment"]["rewards"]):
            reward["name"] = f"reward{index}"
    return None


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
