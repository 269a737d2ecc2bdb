"""Which modules of this folder are benchmarks, which code each measures, and which results are older than that code.

    python -m benchmarks.programs     lists the results with their commit and the changes since

Belongs here: reading programs and results without running them. Does not belong here: measuring (`harness`).
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, ROOT

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


def main() -> int:
    """Only reports. `tests/architecture/test_results.py` checks what a result must contain."""
    for name, result in load_results().items():
        try:
            print(f"{name:28} {age_of(name, result).in_words()}")
        except (OSError, subprocess.CalledProcessError):
            print("no git checkout: nothing tells how old the results of benchmarks are")
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
