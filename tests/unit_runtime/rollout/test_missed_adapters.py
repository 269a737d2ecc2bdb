"""The engine over servers, where an adapter's bytes go another way than files and do not always arrive.

The servers are fakes, which read no ticket; real ones do in `tests/engines/test_transports.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.fake_servers import FakeServer, dies_at, once

from orbit_runtime.adapters.ticket import NOT_ARRIVED
from orbit_runtime.errors import GateError
from orbit_runtime.observability.metrics import RunMetrics
from orbit_runtime.rollout.replica import Replica
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.rollout.sglang_api import SGLangApi
from orbit_runtime.rollout.transport import FolderMailbox, shared_memory
from orbit_runtime.rollout.wire import Wire, build_client
from tests.unit_runtime.rollout.test_served_engine import Words, adapter

Build = Callable[..., ServedEngine]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    made: list[ServedEngine] = []

    def start(*servers: FakeServer) -> ServedEngine:
        client = build_client()
        desk = FolderMailbox(tmp_path / "adapters", shared_memory)
        engine = ServedEngine(Words(), client, desk=desk, max_running_requests=64)
        made.append(engine)
        for server in servers:
            server.start()
        engine.attach(
            [
                Replica(f"replica {index}", server, SGLangApi(Wire(client, server)), engine.loaded, patience=5.0)
                for index, server in enumerate(servers)
            ]
        )
        return engine

    yield start
    for engine in made:
        engine.close()


def told(*servers: FakeServer, name: str = "policy-v1") -> list[str]:
    return [(server.held[name] or Path()).name for server in servers]


def test_servers_are_told_a_ticket_and_one_that_it_does_not_reach_gets_files(build: Build) -> None:
    servers = FakeServer(), FakeServer()
    engine = build(*servers)
    servers[1].faults.append(once("/load_lora_adapter", 400, {"error_message": f"{NOT_ARRIVED}: given back"}))
    engine.load_adapter("policy-v1", adapter(1))
    assert told(*servers) == ["ticket", "policy-v1"]
    metrics = RunMetrics(run="r", namespace="a")
    metrics.add_engine(engine.read_servers)
    counts = [line for line in metrics.render().decode().splitlines() if line.startswith("orbit_engine_missed")]
    assert [line.split()[-1] for line in counts] == ["0.0", "1.0"]
    assert engine.copies()[1].adapter_digest("policy-v1") == adapter(1).digest
    folder = engine.loaded["policy-v1"].files()
    engine.unload_adapter("policy-v1")
    assert not folder.exists()


def test_a_refusal_is_no_reason_for_files(build: Build) -> None:
    servers = FakeServer(), FakeServer()
    engine = build(*servers)
    servers[1].faults.append(once("/load_lora_adapter", 400, {"error_message": "arrived as sha256:1, not sha256:2"}))
    with pytest.raises(GateError, match=r"replica 1 refused adapter policy-v1: .*arrived as sha256:1"):
        engine.load_adapter("policy-v1", adapter(1))
    assert [set(server.held) for server in servers] == [set(), set()]


def test_one_that_dies_while_it_is_handed_an_adapter_comes_back_by_files(build: Build) -> None:
    servers = FakeServer(), FakeServer()
    engine = build(*servers)
    servers[1].faults.append(dies_at("/load_lora_adapter"))
    engine.load_adapter("policy-v1", adapter(1))
    engine.load_adapter("policy-v2", adapter(2))
    assert (told(*servers), told(*servers, name="policy-v2")) == (["ticket", "policy-v1"], ["ticket", "ticket"])
    assert engine.copies()[1].adapter_digest("policy-v1") == adapter(1).digest


def test_some_processes_of_a_server_having_it_does_not_keep_its_name(build: Build) -> None:
    """SGLang holds a name back that only some of its ranks loaded, until it is unloaded."""
    server = FakeServer()
    engine = build(server)

    def half(fake: FakeServer, path: str, body: dict) -> tuple[int, dict] | None:
        if path != "/load_lora_adapter":
            return None
        fake.held[body["lora_name"]] = None
        return 400, {"error_message": f"{NOT_ARRIVED}: given back"}

    server.faults.append(half)
    engine.load_adapter("policy-v1", adapter(1))
    assert told(server) == ["policy-v1"]
