"""What a new user is told: examples below each help, and the command that another tool's word means."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import typer

from orbit_runtime.cli.hints import EXAMPLES, MEANT
from orbit_runtime.cli.main import app, run_command

Captured = pytest.CaptureFixture[str]


def commands(found: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in found.items():
        if hasattr(command, "commands"):
            yield from commands(command.commands, f"{before}{name} ")
        else:
            yield before + name, command


ROOT: Any = typer.main.get_command(app)
COMMANDS = dict(commands(ROOT.commands))


def test_every_command_for_people_has_an_example() -> None:
    # A pod starts `orbit agent`, nobody else does.
    assert set(EXAMPLES) == set(COMMANDS) - {"agent"}


@pytest.mark.parametrize(("name", "follows"), [(name, each) for name, lines in EXAMPLES.items() for each in lines])
def test_an_example_is_understood_by_its_command(name: str, follows: str) -> None:
    COMMANDS[name].make_context(name, shlex.split(follows))


def test_a_help_ends_with_its_examples_one_a_line(capsys: Captured) -> None:
    assert run_command(["data", "prepare", "--help"]) == 0
    shown = capsys.readouterr().out.partition("Examples:\n")[2].splitlines()
    assert [line.strip() for line in shown] == [f"orbit data prepare {each}" for each in EXAMPLES["data prepare"]]


def test_an_argument_is_shown_without_a_python_type(capsys: Captured) -> None:
    shown = {}
    for name in COMMANDS:
        assert run_command([*name.split(), "--help"]) == 0
        shown[name] = capsys.readouterr().out.partition("Options:")[0]
    assert not [name for name, text in shown.items() if "<" in text]
    assert "DIR  Run folders" in " ".join(shown["report"].split(" ")).replace("   ", "  ")


def test_a_word_of_another_tool_names_the_command_that_does_it(capsys: Captured) -> None:
    assert not set(MEANT) & {name.split()[0] for name in COMMANDS}
    assert all(ours in COMMANDS or ours in ("--version", "--help") for ours in MEANT.values())
    assert run_command(["train", "run.yaml"]) == 64
    assert capsys.readouterr().err == "error: orbit: there is no command 'train'\n  fix: `orbit run` does this\n"


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (["data", "prepar"], "orbit data"),
        (["data", "prepare", "--no-such"], "orbit data prepare"),
        (["nope"], "orbit"),
        (["eval", "runs/a", "--steps"], "orbit eval"),
        (["data", "prepare", "a", "b", "--limit"], "orbit data prepare"),
    ],
)
def test_an_error_names_the_innermost_command_that_was_understood(
    arguments: list[str], path: str, capsys: Captured
) -> None:
    assert run_command(arguments) == 64
    said = capsys.readouterr().err
    assert said.startswith(f"error: {path}: ")
    assert said.endswith(f"see `{path} --help`\n")
