"""Servers that start beside ranks: where they may, that a failure is told at once, and that nothing outlives the end.

The server is a program that only sleeps or ends: what is tested comes before one would respond.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.errors import EngineDiedError, UnsupportedError
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.planner.layout import Layout
from orbit_runtime.sides.engines import EngineAhead, _Closing, engine_settings, may_start_ahead
from orbit_runtime.sides.interface import EngineOrder
from orbit_runtime.sides.trainers import TrainerLayout
from orbit_runtime.spec import MachineFacts, Resolved, load_manifest, resolve
from orbit_runtime.workers.servers.process import PYTHON_VARIABLE

ROOT = Path(__file__).parents[3]
CPU, GPUS = MachineFacts(has_cuda=False, num_gpus=0), MachineFacts(has_cuda=True, num_gpus=8)
RANKS = TrainerLayout("Megatron", Layout(), 1024, 512, "None", None)
ALONE = TrainerLayout("Torch", Layout(), 1024, 512, "None", None)


def asked(machine: MachineFacts = CPU, *overrides: str) -> Resolved:
    manifest = load_manifest(ROOT / "examples/ranks.yaml", ["spec.rollout.engine=SGLang", *overrides], environ={})
    return resolve(manifest, machine)


def order(model: Path, closing: ExitStack, *overrides: str) -> EngineOrder:
    return EngineOrder(engine_settings(asked(CPU, *overrides)), ChatTokenizer(model), model, ((1, 2, 3),), closing)


def below() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def check_for(ahead: EngineAhead, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ahead.check()
        time.sleep(0.05)


def server(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv(PYTHON_VARIABLE, str(program))


@pytest.mark.parametrize(
    ("machine", "overrides", "division", "may"),
    [
        (CPU, (), RANKS, True),
        (CPU, (), ALONE, False),
        (GPUS, (), RANKS, False),
        (GPUS, ("spec.placement.layout=Split",), RANKS, True),
        (CPU, ("spec.rollout.engine=OpenAI", "spec.rollout.endpoints=[{url: http://localhost:1}]"), RANKS, False),
    ],
)
def test_servers_start_beside_ranks_unless_they_share_gpus(
    machine: MachineFacts, overrides: tuple[str, ...], division: TrainerLayout, may: bool
) -> None:
    assert may_start_ahead(asked(machine, *overrides), division) is may


def test_a_failed_start_is_told_while_ranks_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server(tmp_path, "echo no room on the device; exit 3", monkeypatch)
    with ExitStack() as closing:
        ahead = EngineAhead(order(builtin_folder("tiny-moe-adder", "INT4"), closing))
        closing.callback(ahead.close)
        with pytest.raises(EngineDiedError, match="ended with 3 while it started: no room on the device"):
            check_for(ahead, 60)
        with pytest.raises(EngineDiedError):
            ahead.take()


def test_an_end_while_a_server_starts_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server(tmp_path, "exec sleep 600", monkeypatch)
    before = set(below())
    ahead = EngineAhead(order(builtin_folder("tiny-moe-adder", "INT4"), ExitStack()))
    until = time.monotonic() + 60
    while not (started := set(below()) - before):
        assert time.monotonic() < until
        ahead.check()
        time.sleep(0.02)
    began = time.monotonic()
    ahead.close()
    ahead.close()
    assert time.monotonic() - began < 10
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in started)
    with pytest.raises(EngineDiedError):
        ahead.check()


def test_an_end_before_the_server_starts_starts_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server(tmp_path, "exec sleep 600", monkeypatch)
    before = set(below())
    EngineAhead(order(builtin_folder("tiny-moe-adder", "INT4"), ExitStack())).close()
    assert not {each for each in set(below()) - before if each.status() != psutil.STATUS_ZOMBIE}


def test_an_adapter_that_no_server_applies_is_refused_before_anything_starts() -> None:
    model = builtin_folder("tiny-moe-adder", "INT4")
    made = order(model, ExitStack(), "spec.adapter.targets=[q_proj]")
    with pytest.raises(UnsupportedError, match="k_proj and v_proj"):
        EngineAhead(made)


def test_what_is_pushed_after_the_end_is_closed_at_once() -> None:
    closing, ended = _Closing(), []
    closing.callback(ended.append, "early")
    other = threading.Thread(target=closing.close)
    other.start()
    other.join()
    with pytest.raises(EngineDiedError):
        closing.callback(ended.append, "late")
    assert ended == ["early", "late"]
