"""Tools in TypeScript, for Kimi: texts that the published code wrote of the same tools are in `kimi_tools.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.data.typescript import NotWritable, sorted_keys, write_tools

CASES = json.loads(Path(__file__).with_name("kimi_tools.json").read_text(encoding="utf-8"))


def function(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize("case", CASES, ids=[case["what"] for case in CASES])
def test_the_text_is_the_one_that_the_published_code_writes(case: dict[str, Any]) -> None:
    assert write_tools(case["tools"]) == case["text"]


def test_the_order_of_keys_and_tools_as_they_are_given_do_not_change() -> None:
    tools = [function(properties={"b": {"type": "string"}, "a": {"type": "integer"}})]
    before = json.dumps(tools)
    declared = "type f = (_: {\n  a?: number,\n  b?: string\n}) => any;"
    assert write_tools(tools) == f"# Tools\n\n## functions\nnamespace functions {{\n{declared}\n}}\n"
    assert json.dumps(tools) == before
    assert list(sorted_keys(function(b=1, a=[{"d": 1, "c": 2}]))["function"]["parameters"]) == ["a", "b"]
    assert write_tools([]) == ""


@pytest.mark.parametrize(
    "schema",
    [
        {"description": "no type"}, {"$ref": "#/$defs/None"}, {"$ref": "https://there"}, {"type": ["odd"]}, 3,
        {"enum": ["a"], "type": "integer"}, {"enum": ["a"], "type": ["string", "integer"]}, {"anyOf": 3},
        {"type": "object", "additionalProperties": 3}, {"type": "object", "properties": ["a"]},
    ],
)  # fmt: skip
def test_what_the_published_code_refuses_is_refused(schema: object) -> None:
    with pytest.raises(NotWritable):
        write_tools([function(properties={"a": schema})])
