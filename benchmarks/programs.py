"""Which modules of this folder are benchmarks, which code each measures, and which results are older than that code.

    python -m benchmarks.programs             lists the results with their commit and the changes since
    python -m benchmarks.programs --tables    writes the tables of the documents from the results

Belongs here: reading programs and results without running them. Does not belong here: measuring (`harness`).
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.harness import RESULTS, ROOT, Comparison
from orbit_runtime.spec.objectives import OBJECTIVES

FOLDER = ROOT / "benchmarks"


def programs() -> list[Path]:
    """Modules with `MEASURES`, sorted by name."""
    return [path for path in sorted(FOLDER.glob("*.py")) if _declared(path) is not None]


def measures(program: Path) -> tuple[str, ...]:
    """Paths, relative to the repository's root, whose code the benchmark measures, including its own module."""
    declared = _declared(program)
    assert declared is not None, f"{program.name} has no MEASURES"
    return (*declared, program.relative_to(ROOT).as_posix())


def _declared(path: Path) -> tuple[str, ...] | None:
    """Parsed, not imported: an import may need packages that are not installed."""
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "MEASURES" for target in statement.targets
        ):
            return tuple(ast.literal_eval(statement.value))
    return None


def program_of(result: str) -> Path:
    """The program of a result, whose name is the program's or begins with it."""
    found = [path for path in programs() if result == path.stem or result.startswith(f"{path.stem}_")]
    if not found:
        raise ValueError(f"benchmarks/results/{result}.json: no program writes it")
    return max(found, key=lambda path: len(path.stem))


def load_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """File name without its extension → content."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


@dataclass(frozen=True)
class Age:
    """A result's age, in commits that changed what it measured."""

    result: str
    commit: str
    is_stated: bool
    """False: the result does not name its commit, and `commit` is the one that added its file."""
    changes: int | None
    """Commits since then that changed what is measured; None if this checkout does not have the commit."""

    def in_words(self) -> str:
        since = f"{self.commit[:10]}{'' if self.is_stated else ' at the latest'}"
        if self.changes is None:
            return f"measured on {since}, which this checkout does not have"
        if not self.changes:
            return f"measured on {since}: current"
        return f"measured on {since}: OLDER than {self.changes} commits to what it measures"


def age_of(name: str, result: dict[str, Any], root: Path = ROOT) -> Age:
    """Raises CalledProcessError outside a git checkout."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()

    stated = result.get("commit")
    commit = stated or git("log", "-1", "--format=%H", "--", f"benchmarks/results/{name}.json")
    if not commit:
        return Age(name, "no commit", False, None)
    try:
        changes = int(git("rev-list", "--count", f"{commit}..HEAD", "--", *measures(program_of(name))))
    except subprocess.CalledProcessError:
        return Age(name, commit, bool(stated), None)
    return Age(name, commit, bool(stated), changes)


Results = Mapping[str, Mapping[str, Any]]
OLD, UNKNOWN, TIMES = " (old)", "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"
SPEED = (
    ("a whole RL step, 32 x 16 samples x 4 tokens, proof and checkpoint included", "TRL 1.16 + PEFT",
     "rl_step_vs_trl", "RL step, 32 x 16 x 4 tokens", "TRL"),
    ("the same, 16 x 16 samples of up to 128 tokens", "TRL 1.16 + PEFT",
     "rl_step_vs_trl", "RL step, 16 x 16, long-tailed up to 128", "TRL"),
    ("the same, a pretrained model of 135 M, 8 x 8 samples of up to 48 tokens", "TRL 1.16 + PEFT, its faster dtype",
     "rl_step_vs_trl_real", "RL step, 135 M, 8 x 8, up to 48 tokens", "TRL"),
    ("generation, 64 requests of equal length", "transformers `generate`",
     "generation_vs_transformers", "generation, 64 requests, 64 tokens", "transformers"),
    ("generation, 256 requests of long-tailed length", "transformers `generate`",
     "generation_vs_transformers", "generation, 256 requests, up to 128", "transformers"),
    ("generation, a pretrained model of 135 M, 64 requests", "transformers `generate`, its faster dtype",
     "generation_vs_transformers_real", "generation, 64 requests, 64 tokens", "transformers"),
    ("SFT, 32 rows of mixed length", "TRL 1.16 + PEFT, sorted by length",
     "sft_speed", "SFT step, 32 rows of mixed length", "TRL"),
    ("the same, a pretrained model of 135 M", "TRL 1.16 + PEFT, sorted, its faster dtype",
     "sft_speed_real", "SFT step, 32 rows of mixed length", "TRL"),
    ("the pretrained model's RL step on an INT4 base", "the same step on its BF16 base",
     "quantised_base_real", "RL step, 8 x 8, up to 48 tokens, INT4 base", "BF16"),
    ("the same on an NVFP4 base", "the same step on its BF16 base",
     "quantised_base_real", "RL step, 8 x 8, up to 48 tokens, NVFP4 base", "BF16"),
    ("frozen INT4 linear, 4096², forward + backward", "plain torch",
     "frozen_linear", "INT4 4096x4096, 256 rows, forward + backward", "plain torch"),
    ("the same", "torchao's INT4 kernel",
     "frozen_linear_vs_libraries", "4096x4096, 256 rows, forward + backward", "torchao int4, its kernel"),
    ("the same", "bitsandbytes' NF4",
     "frozen_linear_vs_libraries", "4096x4096, 256 rows, forward + backward", "bitsandbytes nf4"),
)  # fmt: skip
"""The README's speed table: what, against what; result, comparison, and how the names of its other sides begin. Of
several the fastest counts; a row without a result is left out."""


def tables(results: Results, old: Collection[str] = ()) -> list[tuple[Path, str, Iterable[str]]]:
    """Document, the line of its table's head, and the table's rows.

    Args:
        old: results that are older than the code, which their rows then say.
    """
    algorithms, sglang = (ROOT / "docs" / "guides" / f"{name}.md" for name in ("algorithms", "sglang"))
    return [
        (ROOT / "README.md", "| what | against | ratio | our target | of the possible |", _speed(results, old)),
        (FOLDER / "README.md", "| result | what | ratio | target | of the possible |", _comparisons(results, old)),
        (algorithms, "| `type` | 1st sixth | 2nd | 3rd | 4th | 5th | 6th | 6th, each seed |", _curves(results, old)),
        (sglang, "| engine | base | trainer itself | engine itself | adapter off | random adapter | p99 | max |",
         _parity(results, old)),
        (sglang, "| | idle | the engine's own load call, and a prefill as long as the proof's | a publish, with the "
         "trainer's passes |", _gaps(results, old)),
    ]  # fmt: skip


def with_rows(text: str, head: str, rows: Iterable[str]) -> str:
    """The document with these rows in the table with this head."""
    before, found, after = text.partition(f"{head}\n")
    assert found, f"no table with the head {head}"
    lines = after.splitlines(keepends=True)
    end = next((at for at, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return "".join([before, found, lines[0], *(f"{row}\n" for row in rows), *lines[end:]])


def _speed(results: Results, old: Collection[str]) -> list[str]:
    rows = []
    for what, against, result, name, other in SPEED:
        found = [each for each in _rows(results.get(result, {})) if each.name == name and each.b.startswith(other)]
        if found:
            rows.append(
                _line(
                    what.replace(" x ", f" {TIMES} "),
                    against,
                    *_measured(min(found, key=lambda each: each.ratio), result in old),
                )
            )
    return rows


def _comparisons(results: Results, old: Collection[str]) -> list[str]:
    return [
        _line(f"`{name}`", f"{row.name}: {row.a} against {row.b}", *_measured(row, name in old))
        for name, result in results.items()
        for row in _rows(result)
    ]


def _rows(result: Mapping[str, Any]) -> list[Comparison]:
    return [Comparison(**each) for each in result.get("comparisons", ())]


def _measured(row: Comparison, is_old: bool) -> tuple[str, str, str]:
    """Ratio, target, and the shares of what is possible: ours, and in brackets the other's."""
    missed = ", missed" if row.target is not None and row.ratio < row.target else ""
    target = UNKNOWN if row.target is None else f"{row.target:.3g}{TIMES}{missed}"
    shares = f"{row.shares[0]:.2f} ({row.shares[1]:.2f})" if row.shares else UNKNOWN
    return f"{row.ratio:.2f}{TIMES}{OLD if is_old else ''}", target, shares


def _curves(results: Results, old: Collection[str]) -> Iterator[str]:
    for name in OBJECTIVES:
        for result in ("objectives", "objectives_distillation"):
            curves = results[result]["figures"]
            if seeds := [curves[f"{name} seed {seed}"] for seed in range(3) if f"{name} seed {seed}" in curves]:
                ends = sorted(curve[-1] for curve in seeds)
                mean = (f"{fmean(part):.3f}" for part in zip(*seeds, strict=True))
                yield _line(f"`{name}`", *mean, f"{ends[0]:.3f} to {ends[-1]:.3f}{OLD if result in old else ''}")


def _parity(results: Results, old: Collection[str]) -> Iterator[str]:
    for each in results["parity_by_format"]["figures"]["found"]:
        found = each["preflight"]
        means = [found[pair]["mean"] for pair in ("trainer_floor", "engine_floor", "base", "random")]
        numbers = [f"{value:.1e}" for value in (*means, found["random"]["p99"], found["random"]["max"])]
        yield _line(each["engine"], each["precision"] + (OLD if "parity_by_format" in old else ""), *numbers)


def _gaps(results: Results, old: Collection[str]) -> Iterator[str]:
    for adapter in ("LoRA", "OFT"):
        found = results["sglang_publish"]["figures"][adapter]
        gaps = (f"{found[f'gap p99 ms{when}']:.0f} ms" for when in ("", ", the engine's own", " while publishing"))
        yield _line(adapter + (OLD if "sglang_publish" in old else ""), *gaps)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def write_tables() -> None:
    results = load_results()
    old = {name for name, result in results.items() if age_of(name, result).changes != 0}
    for document, head, rows in tables(results, old):
        document.write_text(with_rows(document.read_text(encoding="utf-8"), head, rows), encoding="utf-8")


def main() -> int:
    """Only reports, unless it is asked for the tables. `tests/architecture/test_results.py` checks what a result must
    contain, and that the tables are the results."""
    if sys.argv[1:] == ["--tables"]:
        write_tables()
    for name, result in load_results().items():
        try:
            print(f"{name:28} {age_of(name, result).in_words()}")
        except (OSError, subprocess.CalledProcessError):
            print("no git checkout: nothing tells how old the results of benchmarks are")
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
