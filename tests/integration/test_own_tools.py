"""What tests are made with: a sample of the fuzzer, so that it still runs and what it draws is still refused (the whole
of it: `make fuzz`); the launcher of runs.
"""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from tests.integration.run_launcher import RunLauncher

ROOT = Path(__file__).resolve().parents[2]


def test_a_sample_of_hostile_files_is_refused_in_order() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--most", "6", "--kinds", "manifests", "rows", "headers"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "{'manifests': 6, 'rows': 6, 'headers': 6}: 0 findings" in done.stdout


def test_a_late_answer_of_the_launcher_is_none_to_the_next_question() -> None:
    launcher = object.__new__(RunLauncher)
    late = '{"pid": 7, "number": 1}\n{"code": 0, "number": 1}\n'
    answers = io.StringIO(late + '{"pid": 8, "number": 2}\n{"code": 75, "number": 2}\n')
    vars(launcher).update(_asked=1, _process=SimpleNamespace(stdin=io.StringIO(), stdout=answers))
    assert (launcher.start({}, "out"), launcher.wait()) == (8, 75)
