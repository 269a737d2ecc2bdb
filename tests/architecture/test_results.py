"""What a committed result of a benchmark must have, and that the README's table is those results."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.harness import ROOT
from benchmarks.programs import load_results, measures, program_of, programs

BEFORE_COMMITS_WERE_NAMED = {"operator_scale"}
"""Results without a commit. One that is measured again leaves this list; none may come to it."""
SPEED_TABLE = [
    ("rl_step_vs_trl", "RL step, 32 x 16 x 4 tokens", "TRL + PEFT"),
    ("rl_step_vs_trl", "RL step, 16 x 16, long-tailed up to 128", "TRL + PEFT"),
    ("generation_vs_transformers", "generation, 64 requests, 64 tokens", "transformers"),
    ("generation_vs_transformers", "generation, 256 requests, up to 128", "transformers"),
    ("frozen_linear", "INT4 4096x4096, 256 rows, forward + backward", "plain torch"),
]
"""Result, comparison and its other side of every row of the README's speed table, in its order."""
TIMES = "\N{MULTIPLICATION SIGN}"
OLD = "older than the code"
"""What the README must say above its speed table while a result in it does not name its commit."""


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


def speed_table(readme: str) -> list[tuple[str, str]]:
    """Ratio and target of every row, as they are written."""
    section = readme.partition("## How fast")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split("|") for line in section.splitlines() if line.startswith("|")]
    return [(row[-2].strip(), row[-1].strip()) for row in rows[2:]]


def test_the_speed_table_of_the_readme_is_the_committed_results() -> None:
    results = load_results()
    expected = []
    for result, name, other in SPEED_TABLE:
        (row,) = [each for each in results[result]["comparisons"] if (each["name"], each["b"]) == (name, other)]
        expected.append((f"{row['ratio']:.2f}{TIMES}", f"{row['target']:g}{TIMES}"))
    assert speed_table((ROOT / "README.md").read_text(encoding="utf-8")) == expected


def test_the_curves_of_the_algorithms_guide_are_the_committed_results() -> None:
    results = load_results()
    figures = results["objectives"]["figures"] | results["objectives_distillation"]["figures"]
    guide = (ROOT / "docs" / "guides" / "algorithms.md").read_text(encoding="utf-8")
    table = guide.partition("6th, each seed |\n")[2].partition("\n\n")[0]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]
    assert len(rows) == len(figures) / 3
    for name, *cells in rows:
        seeds = [figures[f"{name} seed {seed}"] for seed in range(3)]
        assert [f"{fmean(part):.3f}" for part in zip(*seeds, strict=True)] == cells[:-1]
        ends = sorted(curve[-1] for curve in seeds)
        assert cells[-1] == f"{ends[0]:.3f} to {ends[-1]:.3f}"
        assert all(curve[-1] > curve[0] + 0.2 for curve in seeds), f"{name} did not learn"


def test_the_readme_says_that_its_speed_is_old_as_long_as_it_is() -> None:
    section = Path(ROOT / "README.md").read_text(encoding="utf-8").partition("## How fast")[2].partition("\n## ")[0]
    is_old = any(name in BEFORE_COMMITS_WERE_NAMED for name, _, _ in SPEED_TABLE)
    assert (OLD in section) == is_old
