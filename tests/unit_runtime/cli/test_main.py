"""Every way out of the command line: code, one message, and what is printed where."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from fakes.run_folder import SyntheticRun, write_run_folder
from rich.table import Table
from rich.text import Text

from orbit_runtime.cli import main as cli
from orbit_runtime.cli.main import run_command
from orbit_runtime.errors import CredentialsError, InternalError, OrbitError, RewardsFailingError, StorageError
from orbit_runtime.observability.logs import build_console, configure_logs, printable_output

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """A command `fail` that raises what the test put into the list."""
    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    raised: list[BaseException] = []

    @app.callback()
    def _root() -> None:
        pass

    @app.command()
    def fail(as_json: bool = typer.Option(False, "--json")) -> None:
        raise raised[0]

    monkeypatch.setattr(cli, "app", app)
    return raised


@pytest.mark.parametrize(
    "arguments", [["nope"], ["run"], ["run", "--bogus"], ["report", "x", "--margin", "wide"], ["ls", "a", "b"]]
)
def test_a_command_line_that_is_not_understood_is_64(arguments: list[str], capsys: Captured) -> None:
    assert run_command(arguments) == 64
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: orbit")
    assert "--help" in said.err
    assert len(said.err.splitlines()) == 2


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"], ["doctor", "-h"]])
def test_help_and_version_are_0(arguments: list[str], capsys: Captured) -> None:
    assert run_command(arguments) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StorageError("the disk is full", where="runs/x", fix="free some space"), 74),
        (CredentialsError("refused"), 77),
        (RewardsFailingError("12 of 16 rewards crashed"), 86),
    ],
)
def test_an_orbit_error_is_its_code_and_one_message(
    failing: list[BaseException], error: OrbitError, code: int, capsys: Captured
) -> None:
    failing.append(error)
    assert run_command(["fail"]) == code
    said = capsys.readouterr()
    assert said.err == f"error: {error}\n"
    assert "Traceback" not in said.err


def test_control_characters_of_others_are_shown_and_never_sent_to_a_terminal(
    failing: list[BaseException], capsys: Captured
) -> None:
    failing.append(RewardsFailingError("the reward said \x1b]0;title\x07\x1b[2J\r\x9bm", where="\x1b[1A", fix="\x7f"))
    assert run_command(["fail"]) == 86
    said = capsys.readouterr().err
    assert said == "error: ␛[1A: the reward said ␛]0;title␇␛[2J␍\ufffdm\n  fix: ␡\n"


def test_limits_of_this_process_are_no_bugs(failing: list[BaseException], capsys: Captured) -> None:
    failing.append(ImportError("libtorch_cpu.so: failed to map segment from shared object"))
    assert run_command(["fail"]) == 79
    failing[0] = InternalError("the reward pool failed")
    failing[0].__cause__ = OSError(24, "Too many open files")
    assert run_command(["fail"]) == 78
    said = capsys.readouterr().err
    assert "error: memory ran out: libtorch_cpu.so" in said
    assert "error: ulimit -n: this process may not open more files at once\n  fix: raise the limit" in said


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_console_shows_control_characters_of_texts_and_sends_its_own(is_terminal: bool) -> None:
    stream = io.StringIO()
    with printable_output():
        console = build_console(
            stream, force_terminal=is_terminal, color_system="standard" if is_terminal else None, highlight=False
        )
        console.print("[red]a[/red] \x1b[2J", Text("\x1b]0;t\x07", style="bold"))
        table = Table("name")
        table.add_row("\x1b[31mx")
        console.print(table)
    said = stream.getvalue()
    assert "␛[2J" in said
    assert "␛]0;t" in said
    assert "␛[31m" in said
    assert ("\x1b[31ma\x1b[0m" in said) == is_terminal
    assert "\x1b[2J" not in said
    assert "\x1b]" not in said


def test_logs_show_control_characters(capsys: Captured) -> None:
    configure_logs("Info", "Text")
    with printable_output():
        logging.getLogger("t").warning("said \x1b[2J %s", "\x07")
    said = capsys.readouterr().err
    assert "said ␛[2J" in said
    assert "\x1b[2J" not in said
    assert "\x07" not in said


def test_with_json_an_error_is_one_object_on_standard_output(failing: list[BaseException], capsys: Captured) -> None:
    failing.append(StorageError("the disk is full", where="runs/x", fix="free some space"))
    assert run_command(["fail", "--json"]) == 74
    said = capsys.readouterr()
    assert said.err == ""
    assert json.loads(said.out) == {
        "error": "StorageError",
        "exit_code": 74,
        "who_acts": "cluster",
        "message": "the disk is full",
        "where": "runs/x",
        "fix": "free some space",
    }


def test_a_bug_is_70_with_a_report_file_that_holds_no_secrets(
    failing: list[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    failing.append(ZeroDivisionError("while reading s3://user:hunter2@host/x"))
    assert run_command(["fail"]) == 70
    (path,) = tmp_path.glob("orbit-crash-*.json")
    assert str(path) in capsys.readouterr().err
    text = path.read_text()
    report = json.loads(text)
    assert report["error"] == "builtins.ZeroDivisionError"
    assert report["argv"] == ["fail"]
    assert any("Traceback" in line for line in report["traceback"])
    assert "hunter2" not in text
    assert "wJalrXUtnFEMI" not in text


def test_a_bug_in_a_folder_that_cannot_be_written_is_reported_elsewhere(tmp_path: Path) -> None:
    from orbit_runtime.cli.crash import write_crash_report

    assert write_crash_report(ValueError("x"), ["run"], tmp_path / "gone") is None
    found = write_crash_report(ValueError("x"), ["run", "--set", "token=abc"], tmp_path)
    assert found is not None
    assert json.loads(found.read_text())["argv"] == ["run", "--set", "token=***"]


def test_an_interrupt_is_a_stop_on_request(failing: list[BaseException], capsys: Captured) -> None:
    failing.append(KeyboardInterrupt())
    assert run_command(["fail"]) == 75
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error() -> None:
    source = "import sys; from orbit_runtime.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", source, "run", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 0
    assert errors == b""


LOADED = """
import sys
from orbit_runtime.cli.main import run_command
code = run_command(sys.argv[1:])
loaded = {name.split(".")[0] for name in sys.modules}
print("HEAVY", *sorted(loaded & {"torch", "transformers", "numpy", "pyarrow", "fastapi", "uvicorn"}), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["ls", "{runs}"], ["report", "{runs}/a", "--json"]])
def test_commands_that_train_nothing_load_nothing_heavy(tmp_path: Path, arguments: list[str]) -> None:
    write_run_folder(tmp_path / "a", SyntheticRun(steps=3))
    filled = [argument.format(runs=tmp_path) for argument in arguments]
    ended = subprocess.run([sys.executable, "-c", LOADED, *filled], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.splitlines()[-1] == "HEAVY"


def test_help_comes_at_once() -> None:
    """Within a second on an idle machine: of the processor's time, which other work does not count into."""
    before = os.times()
    subprocess.run([sys.executable, "-m", "orbit_runtime.cli", "--help"], check=True, capture_output=True)
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 2.0


def test_without_a_command_the_help_comes_before_the_error(capsys: Captured) -> None:
    assert run_command([]) == 64
    said = capsys.readouterr().err
    assert said.index("validate") < said.index("error: orbit: Missing command")


def test_every_command_s_line_in_the_help_is_whole(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run_command(["--help"]) == 0
    listed = capsys.readouterr().out.partition("Commands:")[2]
    assert "..." not in listed
    assert all(line.rstrip().endswith(".") for line in listed.splitlines() if line.strip())


@pytest.mark.parametrize("module", ["orbit_runtime", "orbit_runtime.cli"])
def test_the_package_runs_as_a_module_too(module: str) -> None:
    ended = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("orbit ")
    ended = subprocess.run([sys.executable, "-m", module, "validate", "no/such.yaml"], capture_output=True, text=True)
    assert ended.returncode == 64
