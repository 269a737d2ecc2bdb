"""Runs every benchmark, one after the other: `python -m benchmarks`, followed by options that all of them take.

Each prints its own table and writes its own file. A summary follows at the end; the exit status is 1 unless all were
measured. A benchmark that fails does not stop those after it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import NOT_MEASURED, REFUSED, ROOT
from benchmarks.programs import programs

VENDORS = ROOT / ".venv-vendors" / "bin" / "python"
"""Created by `make vendor-table`, for the benchmark that compares with other libraries."""
NEED_VENDORS = ("frozen_linear_vs_libraries",)


def interpreter(program: Path) -> str:
    return str(VENDORS) if program.stem in NEED_VENDORS and VENDORS.exists() else sys.executable


def verdict(status: int, errors: str) -> str:
    """In words, with the last line that the program wrote to standard error."""
    last = (errors.strip().splitlines() or ["without a word"])[-1]
    if status == 0:
        return "measured"
    if status == NOT_MEASURED:
        return f"NOT MEASURED: {last.partition('not measured: ')[2] or last}"
    if status == REFUSED:
        return f"measured, and REFUSED: {last}"
    return f"FAILED with exit status {status}: {last}"


def run_all(found: Sequence[Path], options: Sequence[str]) -> int:
    verdicts = {}
    for program in found:
        print(f"== {program.stem}", flush=True)
        command = [interpreter(program), str(program), *options]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as running:
            assert running.stderr is not None
            errors = ""
            for line in running.stderr:
                print(line, end="", file=sys.stderr, flush=True)
                # Progress may be long; only its end is informative.
                errors = (errors + line)[-2000:]
        verdicts[program.stem] = running.returncode, verdict(running.returncode, errors)
    print("\n== verdicts")
    for name, (_, words) in verdicts.items():
        print(f"{name:28} {words}")
    return int(any(status for status, _ in verdicts.values()))


if __name__ == "__main__":
    sys.exit(run_all(programs(), sys.argv[1:]))
