"""The table of arguments against SGLang's own: every name, kind and choice; and what it does not know, told at once."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.errors import UnsupportedError
from orbit_runtime.spec.engine_arguments import ALLOWED, OURS, argument_flags
from orbit_runtime.workers.servers.agent import OWN_FLAGS
from orbit_runtime.workers.servers.process import ServerProcess, launch_command, launch_environment

LISTING = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
print(json.dumps({
    flag: {
        "nargs": action.nargs, "type": getattr(action.type, "__name__", None),
        "choices": None if action.choices is None else list(action.choices),
    }
    for action in parser._actions for flag in action.option_strings
}))
parser.parse_args(sys.argv[1:])
"""


def list_arguments(*arguments: str) -> dict[str, dict[str, Any]]:
    """Arguments of the SGLang that tests use; it must parse these."""
    python = os.environ["ORBIT_SGLANG_PYTHON"]
    ran = subprocess.run([python, "-c", LISTING, *arguments], capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr[-1000:]
    found: dict[str, dict[str, Any]] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def theirs() -> dict[str, dict[str, Any]]:
    given = {
        name: True if each.kind is bool else each.choices[0] if each.choices else int(max(each.least, 1))
        for name, each in ALLOWED.items()
    }
    return list_arguments("--model-path", "m", *argument_flags(given))


@pytest.mark.parametrize("name", ALLOWED)
def test_an_argument_is_of_the_kind_that_sglang_takes(name: str, theirs: dict[str, dict[str, Any]]) -> None:
    ours, sglangs = ALLOWED[name], theirs[f"--{name}"]
    assert (ours.kind is bool) == (sglangs["nargs"] == 0)
    if ours.kind is bool:
        return
    assert sglangs["nargs"] is None
    kinds = {int: {"int", "human_readable_int"}, float: {"float"}, str: {"str", None}}
    assert sglangs["type"] in kinds[ours.kind]
    assert sglangs["choices"] is None or set(ours.choices) <= set(sglangs["choices"])


def test_sglang_knows_what_orbit_says_and_what_it_refuses(theirs: dict[str, dict[str, Any]]) -> None:
    assert set(theirs) >= OWN_FLAGS
    # Those two are abbreviations that its parser takes.
    assert {name for name in OURS if f"--{name}" not in theirs} <= {"tp", "dp"}


def test_an_argument_that_this_sglang_does_not_know_is_told_before_a_model_is_opened(tmp_path: Path) -> None:
    arguments = ["--model-path", str(tmp_path / "none"), "--device", "cpu", "--no-such-argument", "1"]
    process = ServerProcess(
        "SGLang", launch_command(arguments), environment=launch_environment({}), log=tmp_path / "log"
    )
    try:
        with pytest.raises(UnsupportedError, match="does not know --no-such-argument") as caught:
            process.wait_until(lambda: False, seconds=300)
    finally:
        process.stop()
    assert (caught.value.exit_code, caught.value.where) == (78, "spec.rollout.engineArguments")
