"""Whole runs whose trainer is ranks on Ray: killed, stopped, without a disk, in other divisions, on another base.

They learn demonstrations, so that no engine is needed: what ranks do in a run is the same.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.killing import small_manifest, timeless_rows

pytest.importorskip("megatron", reason="Megatron-Core is not installed")
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("marked"), pytest.mark.timeout(3600)]
SECONDS = 1800.0
"""On two cores that others want, too, a start alone takes minutes."""


def manifest(*, steps: int, every_steps: int = 1, precision: str = "INT4", **data: Any) -> dict[str, Any]:
    """Two ranks, each with the whole of attention and half of the experts."""
    made = small_manifest(steps=steps, every_steps=every_steps)
    spec = made["spec"]
    spec["model"] = {"uri": "builtin://tiny-moe-adder", "precision": precision}
    spec["adapter"]["experts"] = "PerExpert"
    spec["algorithm"] = {"type": "SFT"}
    spec["data"] = {"prompts": [{"uri": "builtin://two-digit-addition", "completionField": "answer"}], **data}
    spec["training"] = {"steps": steps, "promptsPerStep": 16, "learningRate": 2e-3}
    spec["training"] |= {"trainer": "Megatron", "parallel": {"tensor": 1, "expert": 2}}
    del spec["environment"]
    return made


class Started:
    """`orbit run` in a process of its own."""

    def __init__(self, asked: dict[str, Any], out: Path) -> None:
        self.out, self.log = out, out.with_suffix(".log")
        file = out.with_suffix(".json")
        file.write_text(json.dumps(asked))
        command = [sys.executable, "-m", "orbit_runtime.cli", "run", str(file), "--out", str(out)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait(self) -> int:
        return self.process.wait(SECONDS)

    def until(self, happened: Callable[[], object]) -> None:
        end = time.monotonic() + SECONDS
        while not happened():
            assert self.process.poll() is None, self.said[-3000:]
            assert time.monotonic() < end
            time.sleep(0.02)

    def ranks(self) -> list[psutil.Process]:
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in below if "RankActor" in " ".join(each.cmdline() or [each.name()])]

    def has(self, name: str) -> bool:
        return (self.out / name).exists()


@contextmanager
def started(asked: dict[str, Any], out: Path) -> Iterator[Started]:
    made = Started(asked, out)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()


def finish(asked: dict[str, Any], out: Path) -> Started:
    with started(asked, out) as run:
        assert run.wait() == 0, run.said[-3000:]
    return run


def rows(out: Path) -> list[dict[str, Any]]:
    from orbit_runtime.storage import open_store

    return timeless_rows(open_store(str(out)))


def report(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "report.json").read_text())
    assert found["base_digest_before"] == found["base_digest_after"]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    finish(manifest(steps=8), out)
    return out


def test_a_killed_rank_is_named_and_the_same_command_gets_the_same_bits(alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with started(manifest(steps=8), out) as run:
        run.until(lambda: run.has("checkpoints/step-000003/manifest.json"))
        run.ranks()[1].send_signal(signal.SIGKILL)
        assert run.wait() == 81, run.said[-3000:]
    assert "rank 1 (CPU)" in run.said
    assert "Traceback" not in run.said
    finish(manifest(steps=8), out)
    assert rows(out) == rows(alone)
    assert report(out)["adapter_digest"] == report(alone)["adapter_digest"]


def test_sigterm_in_every_stage_ends_with_75_and_the_same_command_goes_on(alone: Path, tmp_path: Path) -> None:
    """While ranks start, before and in the first step, and while a checkpoint is written; one after the other."""
    out = tmp_path / "run"
    stages: dict[str, Callable[[Started], object]] = {
        "ranks start": lambda run: "2 ranks on the CPU" in run.said,
        "first step": lambda run: "2 ranks on the CPU" in run.said and run.has("run.json"),
        "checkpoint": lambda run: run.has("checkpoints/step-000003"),
    }
    for stage, has_come in stages.items():
        with started(manifest(steps=8), out) as run:
            run.until(lambda come=has_come, run=run: come(run))
            run.process.send_signal(signal.SIGTERM)
            assert run.wait() == 75, (stage, run.said[-3000:])
        assert "Traceback" not in run.said
        if run.has("report.json"):
            found = json.loads((out / "report.json").read_text())
            assert found["status"] == "stopped"
            kept = f"checkpoints/step-{found['steps']:06d}" if found["steps"] else None
            assert found["last_checkpoint"] == kept
        run.log.unlink()
    finish(manifest(steps=8), out)
    assert rows(out) == rows(alone)


def test_a_run_of_ranks_ends_early_where_it_gets_no_better_and_stays_ended(tmp_path: Path) -> None:
    asked = manifest(steps=60, validation={"share": 0.01, "everySteps": 2}, limit=400)
    asked["spec"]["training"]["stopWhen"] = {"withoutGainSteps": 4}
    # So large that it unlearns.
    asked["spec"]["training"]["learningRate"] = 0.5
    out = tmp_path / "run"
    said = finish(asked, out).said
    assert "ended early" in said
    steps = report(out)["steps"]
    assert steps < 60
    finish(asked, out)
    assert report(out)["steps"] == steps


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "orbit-test", str(folder)], check=False)
    if made.returncode:
        pytest.skip("a small disk needs the right to mount one")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_full_when_ranks_write_a_checkpoint_ends_the_run_with_74_and_room_continues_it(
    alone: Path, tmp_path: Path
) -> None:
    asked = manifest(steps=8)
    with small_disk(tmp_path / "disk", "64m") as disk:
        out = disk / "run"
        with started(asked, out) as run:
            run.until(lambda: run.has("checkpoints/step-000002/manifest.json"))
            filler = disk / "filler"
            with filler.open("wb") as file:
                try:
                    while True:
                        file.write(b"\0" * (1 << 16))
                        file.flush()
                except OSError:
                    pass
            assert run.wait() == 74, run.said[-3000:]
        assert "Traceback" not in run.said
        filler.unlink()
        finish(asked, out)
        assert rows(out) == rows(alone)


def test_a_checkpoint_of_ranks_goes_on_under_other_numbers_of_ranks_and_on_no_other_base(tmp_path: Path) -> None:
    out = tmp_path / "run"
    finish(manifest(steps=2), out)
    one = manifest(steps=3)
    one["spec"]["training"] |= {"trainer": "Torch", "parallel": {}}
    finish(one, out)
    four = manifest(steps=4)
    four["spec"]["training"]["parallel"] = {"tensor": 2, "expert": 2, "data": 2}
    assert "ranks" in finish(four, out).said
    assert [row["step"] for row in rows(out)] == [1, 2, 3, 4]
    other = manifest(steps=5, precision="BF16")
    with started(other, out) as run:
        assert run.wait() == 73, run.said[-3000:]
    assert "Traceback" not in run.said
    assert [row["step"] for row in rows(out)] == [1, 2, 3, 4]
