"""A trainer process over ranks, as `orbit rl` starts it: the rows of one process with the same ranks, whatever is lost.

Real processes and ranks. What answers is SGLang's API by hand over a real model, which draws the same for the same
requests.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from orbit_runtime.loop.run import run
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.services.children import Children
from orbit_runtime.services.connection import Connection
from orbit_runtime.services.orchestrate import RemoteSides
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage import Store, open_store
from tests.integration.killing import small_manifest, timeless_rows
from tests.integration.policy_server import PolicyServer

pytestmark = [
    pytest.mark.usefixtures("tmp_path", "marked"),
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-Core is not installed"),
]
PATIENCE = 1200.0
"""Of the orchestrator: ranks start on cores that others want too."""


def over_ranks(asked: dict[str, Any]) -> dict[str, Any]:
    asked["spec"]["training"] |= {"trainer": "Megatron", "parallel": {"tensor": 2}}
    return asked


@pytest.fixture
def served() -> Iterator[dict[str, Any]]:
    server = PolicyServer()
    server.start()
    asked = over_ranks(small_manifest(steps=5, every_steps=2))
    asked["spec"]["rollout"] |= {"engine": "OpenAI", "endpoints": [{"url": server.url}]}
    yield asked
    server.stop()


def alone(asked: dict[str, Any], out: Path) -> Store:
    """The run in one process over the same ranks."""
    assert run(OrbitRun.model_validate(asked), out=str(out), progress=SilentProgress()).ended == "done"
    return open_store(str(out))


class Apart:
    """A run whose trainer is a child, until it has ended."""

    def __init__(self, asked: dict[str, Any], folder: Path, children: Children, notes: Sequence[str]) -> None:
        self.out = folder / "out"
        self.notes = notes
        self._asked = OrbitRun.model_validate(asked)
        self._children = children

    def run(self) -> Store:
        children = self._children
        url, check = children.addresses["trainer"], children.check
        line = Connection("trainer", url, children.token, patience=PATIENCE, check=check)
        result = run(self._asked, out=str(self.out), progress=SilentProgress(), sides=RemoteSides(line, None))
        assert result.ended == "done"
        return open_store(str(self.out))

    def ranks(self) -> list[psutil.Process]:
        family = psutil.Process(self._children.pid("trainer")).children(recursive=True)
        return [each for each in family if "RankActor" in " ".join(each.cmdline() or [each.name()])]

    def kill(self) -> None:
        os.kill(self._children.pid("trainer"), signal.SIGKILL)


@contextmanager
def apart(asked: dict[str, Any], folder: Path) -> Iterator[Apart]:
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(asked))
    notes: list[str] = []
    with Children(("trainer",), folder / "run.json", (), notes.append) as children:
        yield Apart(asked, folder, children, notes)


def after(path: Path, do: Callable[[], None]) -> threading.Thread:
    """Does it once that file exists."""

    def wait() -> None:
        while not path.exists():
            time.sleep(0.02)
        do()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def check_named(notes: Sequence[str]) -> None:
    """Once a trainer process has ended, because it lost a rank."""
    told = [note for note in notes if "exit code 81" in note]
    assert len(told) == 1, notes
    assert re.search(r"rank [01] \(CPU\) was killed", told[0])


def test_a_rank_that_is_killed_is_named_and_the_run_goes_on_with_new_ones(
    served: dict[str, Any], tmp_path: Path
) -> None:
    served["spec"]["training"]["steps"] = 2
    with apart(served, tmp_path / "apart") as made:
        killer = after(made.out / "metrics/step-000001.json", lambda: made.ranks()[1].kill())
        kept = made.run()
        killer.join()
    check_named(made.notes)
    assert [row["step"] for row in timeless_rows(kept)] == [1, 2]
    report = json.loads(kept.get("report.json"))
    assert (report["executions"], report["publishes"]) == (1, report["publishes_proven"])


@pytest.mark.long
def test_rows_are_those_of_one_process_whatever_is_lost(served: dict[str, Any], tmp_path: Path) -> None:
    one = alone(served, tmp_path / "one")
    with apart(served, tmp_path / "apart") as made:
        killers = [
            after(made.out / "metrics/step-000001.json", lambda: made.ranks()[1].kill()),
            after(made.out / "metrics/step-000003.json", made.kill),
        ]
        three = made.run()
        for each in killers:
            each.join()
    check_named(made.notes)
    assert [note for note in made.notes if "by signal 9" in note]
    assert timeless_rows(three) == timeless_rows(one)
