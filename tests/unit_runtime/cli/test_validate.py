"""`orbit validate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orbit_runtime.cli.validate import run_validate
from orbit_runtime.errors import ManifestError

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "quickstart.yaml"


def test_a_valid_manifest_is_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    run_validate(EXAMPLE, ["training.steps=7"], as_json=False)
    out = capsys.readouterr().out
    assert "builtin://tiny-adder (INT4)" in out
    assert "LoRA: rank 16, alpha 32, 7 targets" in out
    assert "7 of 32 prompts x 16 samples" in out
    assert out.endswith(f"{EXAMPLE} is valid\n")


def test_the_oft_example_is_summed_up_with_its_own_settings(capsys: pytest.CaptureFixture[str]) -> None:
    run_validate(EXAMPLE.with_name("quickstart-oft.yaml"), [], as_json=False)
    assert "OFT: block size 32, CayleyNeumann" in capsys.readouterr().out


def test_json_holds_name_and_identity(capsys: pytest.CaptureFixture[str]) -> None:
    run_validate(EXAMPLE, [], as_json=True)
    result = json.loads(capsys.readouterr().out)
    assert (result["valid"], result["name"]) == (True, "quickstart")
    assert result["identity"].startswith("sha256:")


def test_problems_are_raised_and_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ManifestError, match=r"spec\.training\.steps"):
        run_validate(EXAMPLE, ["training.steps=0"], as_json=True)
    assert capsys.readouterr().out == ""
