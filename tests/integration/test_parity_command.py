"""`orbit parity` on the shipped model: numbers, verdict and exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orbit_runtime.cli.main import run_command

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "quickstart.yaml")


def test_two_sides_that_agree_are_told_with_their_floors(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["parity", EXAMPLE, "--json"]) == 0
    out, told = capsys.readouterr()
    found = json.loads(out)
    stages = [line.partition(" start: ")[2] for line in told.splitlines() if " start: " in line]
    assert stages[:3] == ["checking the plan", "importing the loop", "reading prompts"]
    assert stages.index("importing torch") < stages.index("measuring both sides")
    assert (found["engine"], found["precision"], found["location"]) == ("Torch", "INT4", None)
    preflight = found["preflight"]
    assert preflight["passed"]
    for name in ("base", "identity", "random", "policy"):
        assert 0 <= preflight[name]["mean"] <= preflight["limit"], name
    assert preflight["random_effect"] > 100 * preflight["limit"]


def test_a_gate_that_does_not_hold_is_84_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    # A model whose two sides are not equal to the bit.
    changes = (
        "spec.model.uri=builtin://tiny-deepseek-v4", "spec.model.precision=MXFP4", 'spec.adapter.targets=["kv_proj"]',
        "spec.parity.meanLimit=1e-12",
    )  # fmt: skip
    assert run_command(["parity", EXAMPLE, *(word for change in changes for word in ("--set", change))]) == 84
    out = capsys.readouterr().out
    # With which adapter they differ in a last bit depends on the processor.
    assert "FAILED: trainer and engine differ (" in out
    assert "adapter off" in out
    assert "limit 1e-12" in out
