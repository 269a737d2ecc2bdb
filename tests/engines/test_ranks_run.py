"""The shape of a large run on a CPU: ranks over Megatron-Core that hold a mixture of experts in parts, and SGLang."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.engines.whole_runs import ROOT, end_runs, log_of, start_run, wait_for_step
from tests.integration.test_recipes import TINY, smaller
from tests.integration.tiny_kimi import make_kimi

pytestmark = pytest.mark.timeout(2400)


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    end_runs()


def start(out: Path, *overrides: str) -> subprocess.Popen[bytes]:
    return start_run("ranks.yaml", out, *(f"spec.{each}" for each in overrides))


def family(run: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(run.pid).children(recursive=True)


def ranks(run: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [each for each in family(run) if "RankActor" in " ".join(each.cmdline() or [each.name()])]


def servers(run: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [each for each in family(run) if "sglang_plugin" in " ".join(each.cmdline())]


@pytest.mark.parametrize("recipe", ["kimi-k2-6", "kimi-k2-6-oft", "qwen3-30b-a3b-nvfp4", "glm-4-5"])
def test_a_recipe_runs_with_its_tiny_model_divided_and_a_server(recipe: str, tmp_path: Path) -> None:
    guide = (ROOT / "docs/guides/models.md").read_text(encoding="utf-8")
    settings = dict(each.split("=", 1) for each in smaller(guide))
    settings |= {
        "model.uri": f"builtin://{TINY[recipe]}", "rollout.engine": "SGLang", "rollout.maxRunningRequests": "4",
        "training.trainer": "Megatron", "training.parallel": "{tensor: 2, expert: 2}",
    }  # fmt: skip
    out = tmp_path / "run"
    run = start_run(f"{recipe}.yaml", out, *(f"spec.{path}={value}" for path, value in settings.items()))
    assert run.wait(900) == 0, log_of(out).read_text()[-3000:]
    assert check_rows(out, 1)["publishes"] == 2


def test_kimi_k2_6_with_the_files_it_is_published_with(tmp_path: Path) -> None:
    published, _ = make_kimi(tmp_path / "model")
    guide = (ROOT / "docs/guides/models.md").read_text(encoding="utf-8")
    settings = dict(each.split("=", 1) for each in smaller(guide))
    settings |= {
        "model.uri": str(published), "model.maxSequenceLength": "128", "rollout.engine": "SGLang",
        "rollout.maxRunningRequests": "4", "training.trainer": "Megatron",
        "training.parallel": "{tensor: 2, expert: 2}",
    }  # fmt: skip
    out = tmp_path / "run"
    run = start_run("kimi-k2-6.yaml", out, *(f"spec.{path}={value}" for path, value in settings.items()))
    assert run.wait(900) == 0, log_of(out).read_text()[-3000:]
    assert check_rows(out, 1)["publishes"] == 2


def check_rows(out: Path, steps: int) -> dict:
    report = dict(json.loads((out / "report.json").read_text()))
    assert report["status"] == "done"
    assert report["publishes"] == report["publishes_proven"]
    assert report["base_digest_before"] == report["base_digest_after"]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(row["parity_mean"] <= row["parity_limit"] <= 1e-4 for row in rows)
    return report


def test_a_rank_that_is_killed_is_named_nothing_stays_and_one_process_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    kill_a_rank(out)
    go_on_in_one_process(out, 3)


@pytest.mark.parametrize(("killed", "code"), [("a rank", 81), ("the server", 82)])
def test_ranks_and_server_start_beside_each_other_and_one_that_dies_ends_both(
    killed: str, code: int, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run = start(out, "training.steps=1")
    until = time.monotonic() + 600
    while not (ranks(run) and servers(run)):
        assert run.poll() is None, log_of(out).read_text()[-3000:]
        assert time.monotonic() < until
        time.sleep(0.05)
    everything = family(run)
    # The first of the server's processes has the others below it, and is what Orbit watches.
    victim = ranks(run)[0] if killed == "a rank" else min(servers(run), key=lambda each: each.create_time())
    victim.send_signal(signal.SIGKILL)
    assert run.wait(120) == code, log_of(out).read_text()[-3000:]
    assert "Traceback" not in log_of(out).read_text()
    _, alive = psutil.wait_procs(everything, timeout=30)
    assert alive == []


@pytest.mark.long
def test_after_a_rank_was_killed_the_run_goes_on_in_two_other_divisions(tmp_path: Path) -> None:
    out = tmp_path / "run"
    kill_a_rank(out)
    # Two replicas that divide the experts alone, then one process with the whole model, on the same servers' numbers.
    again = start(out, "training.steps=4", "training.parallel={tensor: 1, expert: 2}")
    assert again.wait(1200) == 0, log_of(out).read_text()[-3000:]
    check_rows(out, 4)
    go_on_in_one_process(out, 5)


def kill_a_rank(out: Path) -> None:
    run = start(out, "training.steps=4")
    # A step's checkpoint is written beside the next step: once that one is there, the first is durable.
    wait_for_step(out, 2, run, seconds=900)
    everything, victims = family(run), ranks(run)
    assert len(victims) == 2, [each.cmdline() for each in everything]
    assert servers(run)
    victims[1].send_signal(signal.SIGKILL)
    assert run.wait(300) == 81, log_of(out).read_text()[-3000:]
    said = log_of(out).read_text()
    assert re.search(r"error: .*rank [01]\b", said), said[-2000:]
    assert "Traceback" not in said
    _, alive = psutil.wait_procs(everything, timeout=30)
    assert alive == []
    assert not list(Path("/dev/shm").glob("*orbit*"))


def go_on_in_one_process(out: Path, steps: int) -> None:
    others = ("training.trainer=Torch", "training.parallel={}", "rollout.engine=Torch")
    last = start(out, f"training.steps={steps}", *others)
    assert last.wait(600) == 0, log_of(out).read_text()[-3000:]
    report = check_rows(out, steps)
    assert report["executions"] == report["resumed"] + 1 >= 2
    assert "ranks: TP2 EP2 PP1 CP1 DP1" in log_of(out).read_text(), "what decides the last bits has changed: said"
