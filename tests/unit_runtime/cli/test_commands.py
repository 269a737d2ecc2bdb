"""What the commands print about runs that are there, and about this machine."""

from __future__ import annotations

import json
import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from fakes.run_folder import SyntheticRun, write_run_folder

from orbit_runtime.api.running import interrupt_kept
from orbit_runtime.cli import doctor
from orbit_runtime.cli.main import run_command
from orbit_runtime.cli.run import format_result
from orbit_runtime.errors import OrbitError
from orbit_runtime.storage import claim_execution, open_store
from tools.reference.commands import EXIT_CODES
from tools.reference.variables import VARIABLES

ROOT = Path(__file__).parents[3]
Captured = pytest.CaptureFixture[str]


def test_a_report_is_printed_and_its_page_written_beside_the_run(tmp_path: Path, capsys: Captured) -> None:
    write_run_folder(tmp_path, SyntheticRun(name="quickstart"))
    assert run_command(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "0.4105 in the first 12 steps, 0.7499 in the last (+0.3394 ± 0.0502)" in said
    assert str(tmp_path / "report.html") in said
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "report.json").read_text())["publishes_proven"] == 61


def test_with_json_a_report_is_printed_and_nothing_is_written(tmp_path: Path, capsys: Captured) -> None:
    write_run_folder(tmp_path, SyntheticRun(name="quickstart"))
    before = sorted(tmp_path.rglob("*"))
    assert run_command(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 60
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_is_no_run_is_a_usage_error(tmp_path: Path, capsys: Captured) -> None:
    assert run_command(["report", str(tmp_path / "nowhere")]) == 64
    assert "there is no run here" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()


def test_the_folder_of_an_evaluation_is_told_apart(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "evaluation.json").write_text("{}")
    (tmp_path / "report.html").write_text("its own")
    execution = claim_execution(open_store(str(tmp_path)), run_name="small-eval")
    execution.release("done")
    assert run_command(["report", str(tmp_path)]) == 64
    assert f"open {tmp_path}/report.html" in capsys.readouterr().err
    assert (tmp_path / "report.html").read_text() == "its own"


def test_a_page_that_cannot_be_written_is_73(tmp_path: Path, capsys: Captured) -> None:
    write_run_folder(tmp_path / "a", SyntheticRun(steps=1))
    assert run_command(["report", str(tmp_path / "a"), "--html", str(tmp_path / "no/such/page.html")]) == 73
    assert "--html" in capsys.readouterr().err


def test_several_runs_are_compared(tmp_path: Path, capsys: Captured) -> None:
    write_run_folder(tmp_path / "a", SyntheticRun(name="a"))
    write_run_folder(tmp_path / "b", SyntheticRun(name="b", gain=0.6, seed=2))
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert run_command(["report", *folders]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^b +60 .* better$", said, re.MULTILINE)
    assert "b: data.seed is 2, not 1" in said
    page = tmp_path / "both.html"
    assert run_command(["report", *folders, "--json", "--margin", "0.5", "--html", str(page)]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["verdict"] for run in runs] == ["baseline", "no difference beyond the margin"]
    assert page.exists()


def test_the_runs_of_a_folder_are_listed(tmp_path: Path, capsys: Captured) -> None:
    write_run_folder(tmp_path / "one", SyntheticRun(name="one"))
    write_run_folder(tmp_path / "two", SyntheticRun(name="two", steps=3, ended=None))
    (tmp_path / "not-a-run").mkdir()
    assert run_command(["ls", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^one +60/60 +0\.7558 +done +checkpoints/step-000060 ", said, re.MULTILINE)
    assert re.search(r"^two +3/60 .* interrupted ", said, re.MULTILINE)
    assert "not-a-run" not in said
    assert run_command(["ls", str(tmp_path), "--json"]) == 0
    assert [run["run"] for run in json.loads(capsys.readouterr().out)] == ["one", "two"]
    assert run_command(["ls", str(tmp_path / "one"), "--json"]) == 0
    assert [run["step"] for run in json.loads(capsys.readouterr().out)] == [60]


def test_a_folder_without_runs_is_an_answer_and_a_missing_one_is_not(tmp_path: Path, capsys: Captured) -> None:
    assert run_command(["ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("no runs in")
    assert run_command(["ls", str(tmp_path / "missing")]) == 64


def test_every_finding_of_the_doctor_has_a_row_in_the_troubleshooting_page() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    rows = set(re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE))
    assert rows == set(doctor.FINDING_IDS)


def test_the_doctor_finds_nothing_that_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cheap = [check for name, check in doctor.CHECKS.items() if name != "torch"]
    findings = [finding for check in cheap for finding in check()]
    assert {finding.id for finding in findings} <= set(doctor.FINDING_IDS)
    assert {finding.state for finding in findings} <= {"ok", "note", "warn", "fail"}
    assert all(finding.fix for finding in findings if finding.state in ("warn", "fail"))
    assert list(tmp_path.iterdir()) == []


def test_the_doctors_verdict_is_its_exit_code(capsys: Captured) -> None:
    """The whole command, torch included: this machine runs tests."""
    code = run_command(["doctor"])
    said = capsys.readouterr().out
    assert ("`orbit run` can work here" in said) == (code == 0)
    assert all(re.search(rf"^(ok|note|warn|fail) +{name} ", said, re.MULTILINE) for name in ("python", "torch", "disk"))


def test_the_doctor_tries_the_store_and_leaves_nothing_in_it(tmp_path: Path) -> None:
    finding = doctor.check_store(str(tmp_path / "runs"))
    assert finding.state == "ok"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    (tmp_path / "file").write_text("")
    assert doctor.check_store(str(tmp_path / "file")).state == "fail"


def test_the_page_of_exit_codes_has_every_code_that_an_error_can_have() -> None:
    def codes(kind: type[OrbitError]) -> set[int]:
        return {kind.exit_code}.union(*(codes(child) for child in kind.__subclasses__()))

    listed = {int(code) for code, _, _ in EXIT_CODES}
    assert codes(OrbitError) | {0, 75} == listed


def test_no_variable_is_listed_twice() -> None:
    names = [variable.name for variable in VARIABLES]
    assert len(names) == len(set(names))


def test_the_result_of_a_run_says_what_it_came_to_and_where_the_report_is() -> None:
    report = {
        "run": "quickstart",
        "steps": 60,
        "seconds": 13.2,
        "reward_first": 0.28,
        "reward_last": 0.81,
        "publishes": 61,
        "publishes_proven": 61,
        "policy_version": 60,
        "warnings": ["a group of one"],
    }
    said = format_result("done", "/srv/runs/quickstart", report)
    assert "reward 0.2800 in the first step, 0.8100 in the last (+0.5300)" in said
    assert "/srv/runs/quickstart/report.html" in said
    assert "warning: a group of one" in said
    points = [{"step": step, "mean": mean} for step, mean in ((0, 0.075), (12, 0.801), (24, 0.674))]
    said = format_result("done", "runs/x", report | {"evaluation": {"held-out": points}})
    assert "held-out 0.075 at step 0, 0.674 at step 24; best 0.801 at step 12" in said
    assert "the same command continues" in format_result("stopped", "runs/x", report)


def test_an_interrupt_that_an_import_loses_is_raised_at_its_end() -> None:
    # Tests that a shell started in the background inherit that Ctrl-C means nothing.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        # As an extension in C that clears the error of what it imports.
        with pytest.raises(KeyboardInterrupt), interrupt_kept(), suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with interrupt_kept():
            pass
    finally:
        signal.signal(signal.SIGINT, before)
