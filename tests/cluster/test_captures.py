"""The comparison of the operations guide with what kubectl prints can fail, and each place of the guide is compared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cluster.captures import GUIDE, captured, shape

HERE = Path(__file__).parent


def read_place(name: str) -> str:
    text = GUIDE.read_text(encoding="utf-8")
    return text.split(f"<!-- printed: {name} -->")[1].split(f"<!-- end: {name} -->")[0]


def test_every_place_of_the_guide_is_compared_once() -> None:
    calls = re.findall(r'check_capture\(release, "([\w-]+)"', "".join(map(Path.read_text, HERE.glob("test_*.py"))))
    assert sorted(calls) == sorted(captured()) == ["node-loss", "success", "suspend", "user-error"]


@pytest.mark.parametrize("name", captured())
def test_every_place_says_who_must_act(name: str) -> None:
    who = {"success": "None", "suspend": "None", "user-error": "User", "node-loss": "Cluster"}[name]
    assert any(f"Who Acts: {who}" in line for line in shape(read_place(name)))


@pytest.mark.parametrize("name", captured())
def test_a_condition_or_an_ending_that_differs_is_seen(name: str) -> None:
    shown = read_place(name)
    blocks = [line for line in shape(shown) if line.endswith(("Type: Failed", "Type: Complete", "Type: Suspended"))]
    assert len(blocks) == 3, "conditions are compared whole"
    for old, new in {"False": "True", "True": "False"}.items():
        changed = re.sub(rf"(Status: +){old}(\n +Type: +Failed)", rf"\1{new}\2", shown)
        assert (changed != shown) == (shape(changed) != shape(shown))
    changed = re.sub(r"(Who Acts: +)\w+", r"\1Orbit", shown, count=1)
    assert shape(changed) != shape(shown)
    assert shape(shown.replace("Conditions:", "Conditionals:")) != shape(shown)
