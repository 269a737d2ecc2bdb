"""What a committed result of a benchmark must have, and that the documents' tables are those results."""

from __future__ import annotations

import re
import subprocess

import pytest

from benchmarks.harness import ROOT
from benchmarks.programs import OLD, SPEED, load_results, measures, program_of, programs, tables, with_rows

BEFORE_COMMITS_WERE_NAMED = {"operator_scale"}
"""Results without a commit. One that is measured again leaves this list; none may come to it."""


def test_every_program_names_paths_that_exist_as_what_it_measures() -> None:
    missing = [f"{each.name}: {path}" for each in programs() for path in measures(each) if not (ROOT / path).exists()]
    assert programs()
    assert not missing


def test_every_program_ends_as_the_harness_says() -> None:
    """A program that writes for itself could write an empty table."""
    ends = re.compile(r"raise SystemExit\((harness\.)?run\(__file__, __doc__, measure\b")
    wrong = [each.name for each in programs() if not ends.search(each.read_text(encoding="utf-8"))]
    assert not wrong


@pytest.mark.parametrize("name", load_results())
def test_a_result_belongs_to_a_program_and_names_a_clean_commit(name: str) -> None:
    result = load_results()[name]
    assert program_of(name).exists()
    if name in BEFORE_COMMITS_WERE_NAMED:
        assert "commit" not in result, f"{name} names its commit: take it from the list"
        return
    assert re.fullmatch("[0-9a-f]{40}", result["commit"] or ""), "measured outside a git checkout"
    assert result["dirty"] is False, "measured on code that no commit has: commit first, then measure"
    assert result["smallest"] is False


def test_results_without_a_commit_are_those_of_the_list() -> None:
    assert load_results().keys() >= BEFORE_COMMITS_WERE_NAMED


def test_the_commit_of_a_result_is_part_of_this_history() -> None:
    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("no git checkout, or a shallow one: there is no history to look in")
    commits = {name: result["commit"] for name, result in load_results().items() if result.get("commit")}
    lost = {name for name, commit in commits.items() if git("merge-base", "--is-ancestor", commit, "HEAD").returncode}
    assert not lost, "measured on a commit that was rewritten or never merged"


def test_the_tables_of_the_documents_are_the_committed_results() -> None:
    """But for the marks of age, which every commit to the code may change: `make bench-table` writes them."""
    for document, head, rows in tables(load_results()):
        text = document.read_text(encoding="utf-8").replace(OLD, "")
        assert with_rows(text, head, rows) == text, f"{document.name}: make bench-table"


def test_the_readme_says_which_of_its_speeds_are_older_than_the_code() -> None:
    results = load_results()
    (_, _, rows) = tables(results, {"rl_step_vs_trl"})[0]
    marked = [OLD in row for row in rows]
    assert marked == [each[2] == "rl_step_vs_trl" for each in SPEED if each[2] in results]


def test_every_algorithm_learned_with_each_seed() -> None:
    results = load_results()
    figures = results["objectives"]["figures"] | results["objectives_distillation"]["figures"]
    flat = [name for name, curve in figures.items() if curve[-1] <= curve[0] + 0.2]
    assert len(figures) == 3 * len({name.partition(" ")[0] for name in figures})
    assert not flat, "did not learn"
