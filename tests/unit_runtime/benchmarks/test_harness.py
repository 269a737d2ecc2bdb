"""What a benchmark may write, and how the run of all of them ends."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import run_all
from benchmarks.harness import RESULTS, Comparison, Measured, NotMeasured, check_measured, measured_on, run
from benchmarks.programs import age_of

ROW = Comparison("row", "ours", "theirs", 1.0, 2.0, 2.0, None, 3)


@pytest.mark.parametrize(
    ("measured", "named"),
    [
        (Measured(), "without a comparison"),
        (Measured(facts={"target": 0.05, "versions": {"torch": "2"}}), "without a comparison"),
        (Measured(figures={"parts": {}, "largest_error": 0.0}), "parts"),
        (Measured(figures={"found": []}), "found"),
        (Measured(figures={"publish_ms": math.nan}), "publish_ms"),
        (Measured(figures={"LoRA": {"publish_ms": math.nan}}), "LoRA"),
        (Measured([Comparison("row", "ours", "theirs", math.nan, 1.0, 1.0, None, 0)]), "row"),
    ],
)
def test_an_empty_table_is_no_result(measured: Measured, named: str) -> None:
    with pytest.raises(NotMeasured, match=named):
        check_measured(measured)


@pytest.mark.parametrize("measured", [Measured([ROW]), Measured(figures={"errors": 0, "parts": {"a": 0.0}})])
def test_a_comparison_or_a_figure_is_a_result(measured: Measured) -> None:
    check_measured(measured)


def run_with(monkeypatch: pytest.MonkeyPatch, words: list[str], measured: Measured | NotMeasured) -> int:
    def measure(_: argparse.Namespace) -> Measured:
        if isinstance(measured, NotMeasured):
            raise measured
        return measured

    monkeypatch.setattr(sys, "argv", ["some.py", *words])
    return run("benchmarks/some.py", "about", measure)


def test_a_result_tells_its_commit_and_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run_with(monkeypatch, ["--out", str(tmp_path)], Measured([ROW], {"bytes": 3}, {"target": 1})) == 0
    result = json.loads((tmp_path / "some.json").read_text())
    assert result["comparisons"][0]["ratio"] == 2.0
    assert (result["figures"], result["facts"], result["smallest"]) == ({"bytes": 3}, {"target": 1}, False)
    assert {"commit": result["commit"], "dirty": result["dirty"]} == measured_on()


@pytest.mark.parametrize("measured", [NotMeasured("no such card"), Measured(figures={"parts": {}})])
def test_what_was_not_measured_leaves_the_result_that_was_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], measured: Any
) -> None:
    (tmp_path / "some.json").write_text("the one before")
    assert run_with(monkeypatch, ["--out", str(tmp_path)], measured) == 3
    assert capsys.readouterr().err.startswith("some: not measured: ")
    assert [path.name for path in tmp_path.iterdir()] == ["some.json"]
    assert (tmp_path / "some.json").read_text() == "the one before"


def test_a_broken_promise_is_written_and_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with(monkeypatch, ["--out", str(tmp_path)], Measured([ROW], refused="2 false alarms")) == 4
    assert (tmp_path / "some.json").exists()
    assert capsys.readouterr().err == "some: 2 false alarms\n"


def test_the_smallest_size_never_overwrites_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(RESULTS.iterdir())
    with pytest.raises(SystemExit, match="2"):
        run_with(monkeypatch, ["--smallest"], Measured([ROW]))
    assert sorted(RESULTS.iterdir()) == before


def test_all_are_run_and_each_ones_verdict_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    endings = {
        "a": "import sys; print('a: not measured: no server', file=sys.stderr); sys.exit(3)",
        "b": "import sys; print('b: one false alarm', file=sys.stderr); sys.exit(4)",
        "c": "raise KeyError('rows')",
        "d": "pass",
    }
    found = [tmp_path / f"{name}.py" for name in endings]
    for path in found:
        path.write_text(endings[path.stem])
    assert run_all(found, []) == 1
    lines = capfd.readouterr().out.partition("== verdicts\n")[2].splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "a NOT MEASURED: no server",
        "b measured, and REFUSED: b: one false alarm",
        "c FAILED with exit status 1: KeyError: 'rows'",
        "d measured",
    ]
    assert run_all(found[3:], []) == 0


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with the code that `plan_seconds` measures, and one commit."""
    for name in ("orbit_runtime/planner/plan.py", "benchmarks/results/plan_seconds.json", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("first\n")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(folder: Path, *words: str) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *author, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(folder: Path) -> str:
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "one more")
    return git(folder, "rev-parse", "HEAD")


def test_the_origin_is_the_commit_and_whether_code_differs_from_it(checkout: Path, tmp_path: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    assert measured_on(checkout) == {"commit": head, "dirty": False}
    (checkout / "benchmarks/results/plan_seconds.json").write_text("measured\n")
    assert measured_on(checkout) == {"commit": head, "dirty": False}
    (checkout / "README.md").write_text("second\n")
    assert measured_on(checkout) == {"commit": head, "dirty": True}


def test_a_result_is_as_old_as_the_commits_to_what_it_measures(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    result = {"commit": head}
    assert age_of("plan_seconds", result, checkout).changes == 0
    (checkout / "README.md").write_text("second\n")
    commit(checkout)
    assert age_of("plan_seconds", result, checkout).changes == 0
    (checkout / "orbit_runtime/planner/plan.py").write_text("second\n")
    commit(checkout)
    age = age_of("plan_seconds", result, checkout)
    assert (age.changes, age.is_stated) == (1, True)
    assert "OLDER" in age.in_words()
    # Without its commit it is as old as its file, at least.
    unnamed = age_of("plan_seconds", {}, checkout)
    assert (unnamed.commit, unnamed.is_stated, unnamed.changes) == (head, False, 1)


def test_a_commit_that_is_not_there_is_no_current_result(checkout: Path) -> None:
    age = age_of("plan_seconds", {"commit": "0" * 40}, checkout)
    assert age.changes is None
    assert "does not have" in age.in_words()
