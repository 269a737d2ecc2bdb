"""Publishes that take long, or meet: no healthy server is restarted for it, and no adapter stands for another.

The servers are fakes (`tests/fakes/fake_servers.py`).
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fakes.fake_servers import FakeServer, Fault

from orbit_runtime.adapters.files import files_digest
from orbit_runtime.errors import GateError
from orbit_runtime.types import AdapterFiles
from tests.unit_runtime.rollout.test_served_engine import Build, adapter, build

__all__ = ["build"]
"""The fixture is the same."""


def large(version: int, megabytes: int) -> AdapterFiles:
    files = {"adapter_model.safetensors": bytes(megabytes * 1_000_000), "adapter_config.json": b"{}"}
    return AdapterFiles(version, files, files_digest(files))


def loads_for(seconds: float, *, answers: bool = True) -> Fault:
    """One load takes so long; where it does not answer, the server says nothing else meanwhile either."""

    def load(server: FakeServer, path: str, body: dict) -> None:
        if path != "/load_lora_adapter" or load not in server.faults:
            return
        server.faults.remove(load)
        server.hangs = not answers
        time.sleep(seconds)
        server.hangs = False

    return load


def test_a_load_that_takes_longer_than_it_was_waited_for_restarts_nobody_and_counts(build: Build) -> None:
    server = FakeServer()
    engine = build(server, timeout=0.3)
    server.faults.append(loads_for(0.8))
    engine.load_adapter("policy-v1", adapter(1))
    assert (server.starts, engine.replicas[0].restarts) == (1, 0)
    assert engine.copies()[0].adapter_digest("policy-v1") == adapter(1).digest


@pytest.mark.parametrize(("megabytes", "starts"), [(100, 1), (0, 2)])
def test_a_server_that_is_silent_over_an_adapters_bytes_is_waited_for_as_long_as_they_take(
    build: Build, megabytes: int, starts: int
) -> None:
    """100 MB may take two seconds; one that says nothing for a second over nothing is lost."""
    server = FakeServer()
    engine = build(server, patience=0.1)
    server.faults.append(loads_for(1.0, answers=False))
    engine.load_adapter("policy-v1", large(1, megabytes))
    assert server.starts == starts
    assert set(server.held) == {"policy-v1"}


def test_what_is_waited_for_an_answer_follows_from_the_bytes(build: Build) -> None:
    server = FakeServer()
    engine = build(server, timeout=0.3)
    asked: list[str] = []
    server.faults += [loads_for(0.8), lambda _, path, body: asked.append(path)]
    engine.load_adapter("policy-v1", large(1, 100))
    assert asked.count("/load_lora_adapter") == 1
    assert server.starts == 1


def test_two_publishes_at_once_go_one_after_the_other(build: Build) -> None:
    server = FakeServer()
    engine = build(server)
    under_way, most = [0], [0]

    def count(_: FakeServer, path: str, body: dict) -> None:
        if path == "/load_lora_adapter":
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
            time.sleep(0.2)
            under_way[0] -= 1

    server.faults.append(count)
    names = [f"policy-v{version}" for version in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(engine.load_adapter, names, map(adapter, (1, 2))))
    assert most == [1]
    for name, version in zip(names, (1, 2), strict=True):
        assert engine.copies()[0].adapter_digest(name) == adapter(version).digest


def test_of_two_publishes_under_one_name_one_is_refused(build: Build) -> None:
    engine = build(FakeServer())
    refused = []

    def publish(version: int) -> None:
        try:
            engine.load_adapter("policy-v1", adapter(version))
        except GateError as error:
            refused.append((version, str(error)))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(publish, (1, 2)))
    ((version, why),) = refused
    assert "used before" in why
    assert engine.copies()[0].adapter_digest("policy-v1") == adapter(3 - version).digest


def test_a_name_that_another_run_took_on_a_shared_server_is_refused(build: Build, tmp_path: Path) -> None:
    server = FakeServer()
    engine = build(server)
    server.held["policy-v1"] = tmp_path
    with pytest.raises(GateError, match=r"replica 0 refused adapter policy-v1: .*already loaded") as caught:
        engine.load_adapter("policy-v1", adapter(1))
    assert caught.value.exit_code == 84
    assert server.held["policy-v1"] == tmp_path, "the other run's stays"
