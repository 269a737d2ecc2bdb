"""Trainer, inference and orchestrator apart: the same adapters as one process, whoever is lost and whenever."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.guide import ROOT, commands, run_in_process
from fakes.ports import free_port

from orbit_runtime.loop.run import run
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.services.children import Children
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage import open_store
from tests.integration.killing import adapter_digests, demanding_manifest, small_manifest, timeless_rows
from tests.integration.run_launcher import RunLauncher
from tests.integration.three_processes import TOKEN, run_apart, two_sides

pytestmark = pytest.mark.timeout(600)
"""Each side imports torch; on two busy cores three of them need minutes."""


@pytest.mark.parametrize(
    "name",
    [
        "small",
        pytest.param("LoRA with dropout", marks=pytest.mark.long),
        pytest.param("MXFP4, PPO with KL", marks=pytest.mark.long),
    ],
)
def test_three_processes_have_the_bits_of_one(tmp_path: Path, name: str) -> None:
    asked = small_manifest(steps=3) if name == "small" else demanding_manifest(name, steps=2)
    run(OrbitRun.model_validate(asked), out=str(tmp_path / "one"), progress=SilentProgress())
    with two_sides(asked) as sides:
        result = run_apart(asked, tmp_path / "three", sides)
    assert result.ended == "done"
    one, three = (open_store(str(tmp_path / each)) for each in ("one", "three"))
    assert adapter_digests(three) == adapter_digests(one)
    assert timeless_rows(three) == timeless_rows(one)


# --- killed ---


@pytest.fixture(scope="module")
def launcher() -> Iterator[RunLauncher]:
    made = RunLauncher({"OMP_NUM_THREADS": "1", "ORBIT_SERVICE_TOKEN": TOKEN})
    yield made
    made.close()


GUIDE = (ROOT / "docs/guides/three_processes.md").read_text()
KINDS = ("trainer", "inference", "orchestrator")
ORDERS = tuple(itertools.permutations(KINDS))
"""In which the three are killed, each while what was killed before it comes back."""


class Processes:
    """The three of a run, each started again where it was killed."""

    def __init__(self, launcher: RunLauncher, manifest: Path, out: Path) -> None:
        ports = {kind: free_port() for kind in KINDS[:2]}
        self._launcher = launcher
        self._commands = {
            kind: [kind, str(manifest), "--listen", f"127.0.0.1:{port}"] for kind, port in ports.items()
        } | {
            "orchestrator": [
                "orchestrator", str(manifest), "--out", str(out), *(
                    part for kind, port in ports.items() for part in (f"--{kind}", f"http://127.0.0.1:{port}")
                ),
            ]
        }  # fmt: skip
        self._pids = {kind: launcher.command(*command) for kind, command in self._commands.items()}

    def kill(self, kind: str) -> None:
        assert self._launcher.ended(self._pids[kind]) is None, f"the {kind} ended by itself: give the run more steps"
        os.kill(self._pids[kind], signal.SIGKILL)
        self._await(kind)
        self._pids[kind] = self._launcher.command(*self._commands[kind])

    def end(self) -> int:
        """Exit code of the orchestrator; the others have ended behind it."""
        code = self._await("orchestrator")
        for kind in KINDS[:2]:
            os.kill(self._pids[kind], signal.SIGTERM)
            assert self._await(kind) == 0
        return code

    def _await(self, kind: str, seconds: float = 100.0) -> int:
        deadline = time.monotonic() + seconds
        while (code := self._launcher.ended(self._pids[kind])) is None:
            if time.monotonic() > deadline:
                self._launcher.dump_stacks_on_signal(self._pids[kind])
                pytest.fail(f"the {kind} goes on")
            time.sleep(0.02)
        return code


@pytest.mark.parametrize(
    "orders",
    [
        pytest.param(ORDERS[:2], id="trainer"),
        pytest.param(ORDERS[2:4], id="inference", marks=pytest.mark.long),
        pytest.param(ORDERS[4:], id="orchestrator", marks=pytest.mark.long),
    ],
)
def test_whoever_is_killed_and_in_whatever_order_the_adapters_are_those_of_one_process(
    tmp_path: Path, launcher: RunLauncher, orders: tuple[tuple[str, ...], ...]
) -> None:
    asked, rng = small_manifest(steps=30, every_steps=3), random.Random(str(orders))
    (tmp_path / "run.json").write_text(json.dumps(asked))
    assert launcher.run(asked, str(tmp_path / "one")) == 0
    processes = Processes(launcher, tmp_path / "run.json", tmp_path / "three")
    store = open_store(str(tmp_path / "three"))
    for kind in itertools.chain.from_iterable(orders):
        # Until there is a step that can be lost, then at any moment of one, or of a start.
        while not [*store.list("rollouts/")]:
            time.sleep(0.02)
        time.sleep(rng.uniform(0.0, 0.8))
        processes.kill(kind)
    assert processes.end() == 0
    assert timeless_rows(store) == timeless_rows(open_store(str(tmp_path / "one")))
    # One that was killed while it started claimed no folder.
    assert 1 < json.loads(store.get("report.json"))["executions"] <= 1 + len(orders)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from orbit_runtime.cli.main import main
main()
"""


def free_of(guide: str, ports: dict[str, int]) -> str:
    """The guide's commands with ports that are free here."""
    for port, free in zip(("8101", "8102"), ports.values(), strict=True):
        guide = guide.replace(f"127.0.0.1:{port}", f"127.0.0.1:{free}")
    return guide


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory, launcher: RunLauncher) -> Path:
    """A folder with the guide's manifest, and what one process makes of it."""
    folder = tmp_path_factory.mktemp("guide")
    (folder / "quickstart.yaml").write_text(json.dumps(small_manifest(steps=6)))
    assert launcher.run(small_manifest(steps=6), str(folder / "one")) == 0
    return folder


def test_the_guides_orchestrator_runs_without_torch(read: Path, launcher: RunLauncher) -> None:
    text = free_of(GUIDE, {kind: free_port() for kind in KINDS[:2]})
    lines = [line.split()[1:] for block in commands(text, "On several machines") for line in block.splitlines()]
    *sides, orchestrator = [
        [str(read / word) if word == "quickstart.yaml" else word for word in each] for each in lines
    ]
    pids = [launcher.command(*each) for each in sides]
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *orchestrator],
        cwd=read,
        env={**os.environ, "ORBIT_SERVICE_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    assert ended.returncode == 0, ended.stderr
    one, three = (timeless_rows(open_store(str(read / each))) for each in ("one", "runs/apart"))
    assert three == one


@pytest.mark.long
def test_the_guides_orbit_rl_starts_again_what_dies_and_leaves_nothing_behind(
    read: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Children] = []
    start = Children.__enter__

    def watched(children: Children) -> Children:
        made.append(children)
        return start(children)

    monkeypatch.setattr(Children, "__enter__", watched)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    store, killed = open_store(str(read / "runs/together")), []

    def kill() -> None:
        while not store.exists("rollouts/step-000002.jsonl.zst"):
            time.sleep(0.02)
        killed.append(made[0].pid("trainer"))
        os.kill(killed[-1], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    (text,) = commands(GUIDE, "On one machine")
    run_in_process(text, read)
    thread.join()
    assert timeless_rows(store) == timeless_rows(open_store(str(read / "one")))
    for pid in (*killed, made[0].pid("trainer"), made[0].pid("inference")):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
