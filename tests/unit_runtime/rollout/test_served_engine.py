"""The engine over servers, held against servers that fail in every way: nothing is lost, doubled or believed.

The servers are fakes (`tests/fakes/fake_servers.py`); the same faults with real SGLang are in `tests/engines`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from fakes.fake_servers import CUT, FakeServer, dies_at, once
from safetensors.torch import save

from orbit_runtime.adapters.files import expected_applied_digest, files_digest
from orbit_runtime.errors import EngineDiedError, GateError
from orbit_runtime.observability.metrics import RunMetrics
from orbit_runtime.parity.liveness import Limits, check_proofs, prove
from orbit_runtime.rollout.replica import Replica
from orbit_runtime.rollout.requests import sample
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.rollout.server_types import LostError, Sleeping
from orbit_runtime.rollout.sglang_api import SGLangApi
from orbit_runtime.rollout.transport import FolderMailbox
from orbit_runtime.rollout.vllm_api import VllmApi
from orbit_runtime.rollout.wire import Wire, build_client
from orbit_runtime.types import AdapterFiles, Completion, Request, Sampling, Scored

CANARY = tuple(range(3, 35))
Build = Callable[..., ServedEngine]


class Words:
    """A tokenizer of numbers."""

    eos_ids = (2,)
    marker_ids: tuple[int, ...] = ()

    def encode_many(self, conversations: object) -> list[list[int]]:
        raise NotImplementedError

    def decode(self, token_ids: object) -> str:
        return "".join(f"word{token}" for token in token_ids)  # type: ignore[attr-defined]


def adapter(version: int) -> AdapterFiles:
    tensors = {f"base_model.model.x.lora_{side}.weight": torch.full((2, 2), float(version)) for side in "AB"}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "use_rslora": False}
    files = {"adapter_model.safetensors": save(tensors), "adapter_config.json": json.dumps(config).encode()}
    return AdapterFiles(version, files, files_digest(files))


def requests(prompts: int, samples: int = 4, name: str | None = "policy-v1", tokens: int = 3) -> list[Request]:
    return [
        Request(prompt * samples + sample, 0, (100 + prompt, 7, 8), Sampling(max_new_tokens=tokens), name)
        for prompt in range(prompts)
        for sample in range(samples)
    ]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    made: list[ServedEngine] = []

    def start(
        *servers: FakeServer, capacity: int = 64, patience: float = 5.0, sleeping: tuple[Sleeping, ...] = (),
        timeout: float | None = None,
    ) -> ServedEngine:  # fmt: skip
        client = build_client()
        if timeout is not None:
            client.timeout = httpx.Timeout(timeout)
        engine = ServedEngine(
            Words(), client, desk=FolderMailbox(tmp_path / "adapters"), max_running_requests=capacity, sleeping=sleeping
        )
        made.append(engine)
        replicas = []
        for index, server in enumerate(servers):
            server.start()
            wire = Wire(client, server)
            api = SGLangApi(wire) if server.kind == "SGLang" else VllmApi(wire)
            replicas.append(Replica(f"replica {index}", server, api, engine.loaded, patience=patience))
        engine.attach(replicas)
        return engine

    yield start
    for engine in made:
        engine.close()


def check_whole(asked: list[Request], found: list[Completion]) -> None:
    assert sorted(each.request_id for each in found) == [each.request_id for each in asked]


def test_prompts_with_one_short_answer_each_are_asked_together(build: Build) -> None:
    server = FakeServer()
    engine = build(server)
    engine.load_adapter("policy-v1", adapter(1))
    bodies: list[dict] = []
    server.faults.append(lambda _, path, body: bodies.append(body) if path == "/generate" else None)
    asked = [replace(each, prompt_ids_T=(7,) * (1 + each.request_id)) for each in requests(40, samples=1)]
    found = {each.request_id: each for each in sample(engine, asked)}
    assert sorted(len(body["input_ids"]) for body in bodies) == [8, 16, 16]
    for request in asked:
        expected = server.logprob("policy-v1", len(request.prompt_ids_T), 0)
        assert found[request.request_id].logprobs_T[0] == pytest.approx(expected)
    bodies.clear()
    list(sample(engine, requests(8, samples=1, tokens=300)))
    assert [len(body["input_ids"]) for body in bodies] == [1] * 8, "long answers go alone"


# --- several replicas ---


def test_metrics_hold_what_each_server_tells_and_leave_out_a_lost_one(build: Build) -> None:
    servers = FakeServer(), FakeServer(kind="vLLM")
    engine = build(*servers)
    metrics = RunMetrics(run="r", namespace="a")
    metrics.add_engine(engine.read_servers)
    (label,) = [line for line in metrics.render().decode().splitlines() if line.startswith("sglang:num_running_reqs")]
    assert label == (
        'sglang:num_running_reqs{attempt="1",model_name="fake",namespace="a",replica="replica 0",run="r"} 0.0'
    )
    told = metrics.render().decode()
    assert 'vllm:num_requests_running{attempt="1",model_name="fake",namespace="a",replica="replica 1",run="r"}' in told
    assert "process_open_fds" not in told
    assert told.count("orbit_engine_up{") == 2
    servers[0].faults.append(once("/metrics", 200, b"no such { format"))
    servers[1].kill()
    told = metrics.render().decode()
    assert "sglang:" not in told
    assert "vllm:" not in told
    assert told.count("orbit_engine_up{") == 2, "our own numbers need no server"
    engine.close()
    assert "orbit_engine_up" not in metrics.render().decode()


def test_prompts_are_spread_over_replicas_and_a_prompts_samples_stay_together(build: Build) -> None:
    servers = FakeServer(), FakeServer()
    engine = build(*servers)
    engine.load_adapter("policy-v1", adapter(1))
    asked = requests(20)
    check_whole(asked, list(sample(engine, asked)))
    counts = [server.calls for server in servers]
    assert sum(counts) == 20, "one call per prompt"
    assert min(counts) >= 6


@pytest.mark.parametrize("when", ["first", "half-way", "both"])
def test_a_replica_that_dies_costs_no_rollout_and_doubles_none(build: Build, when: str) -> None:
    servers = FakeServer(delay=0.01), FakeServer(delay=0.01)
    engine = build(*servers, capacity=8)
    engine.load_adapter("policy-v1", adapter(1))
    for server in servers if when == "both" else servers[:1]:
        server.faults.append(
            dies_at("/generate", lambda body, late=when != "first": not late or body["input_ids"][0][0] >= 108)
        )
    asked = requests(24)
    check_whole(asked, list(sample(engine, asked)))
    assert servers[0].starts == 2
    assert engine.replicas[0].restarts == 1
    assert servers[0].held.keys() == {"policy-v1"}, "it was brought to the current policy"
    assert servers[1].starts == (2 if when == "both" else 1)


def test_what_a_server_refuses_that_was_restarted_meanwhile_is_asked_again() -> None:
    """Its request went out before the end, and reached the new process before that held its adapters."""
    server = FakeServer()
    replica = Replica("the engine", server, SGLangApi(Wire(build_client(), server)), {})

    async def refused() -> None:
        replica.restarts += 1
        raise GateError("policy-v1 is not loaded")

    with pytest.raises(LostError, match="restarted meanwhile"):
        asyncio.run(replica.attempt(refused))


def test_a_restarted_replica_gets_no_work_before_it_holds_the_policy(build: Build) -> None:
    servers = FakeServer(), FakeServer(delay=0.05)
    engine = build(*servers, capacity=4)
    engine.load_adapter("policy-v1", adapter(1))
    seen: list[tuple[str, bool]] = []

    def watch(server: FakeServer, path: str, body: dict) -> None:
        if path == "/generate" and body.get("stream"):
            seen.append((path, "policy-v1" in server.held))

    servers[0].faults += [dies_at("/generate"), watch]
    asked = requests(16)
    check_whole(asked, list(sample(engine, asked)))
    assert seen
    assert all(held for _, held in seen)


def test_other_bytes_after_a_restart_stop_the_run(build: Build, tmp_path: Path) -> None:
    server = FakeServer()
    engine = build(server)
    engine.load_adapter("policy-v1", adapter(1))
    (tmp_path / "adapters" / "policy-v1" / "adapter_model.safetensors").write_bytes(b"other")
    server.faults.append(dies_at("/generate"))
    with pytest.raises(GateError, match="after a restart replica 0 holds"):
        list(sample(engine, requests(2)))


def test_a_replica_that_does_not_come_back_ends_the_run_with_its_log(build: Build) -> None:
    servers = FakeServer(), FakeServer(delay=0.05)
    engine = build(*servers, capacity=4)
    engine.load_adapter("policy-v1", adapter(1))
    servers[0].refuses_to_start = True
    servers[0].faults.append(dies_at("/generate"))
    with pytest.raises(EngineDiedError, match="did not start") as caught:
        list(sample(engine, requests(64)))
    assert caught.value.exit_code == 82


def test_a_replica_killed_in_a_publish_holds_the_new_version_afterwards(build: Build) -> None:
    servers = FakeServer(), FakeServer()
    engine = build(*servers)
    engine.load_adapter("policy-v1", adapter(1))
    servers[1].faults.append(dies_at("/load_lora_adapter"))
    engine.load_adapter("policy-v2", adapter(2))
    assert [copy.adapter_digest("policy-v2") for copy in engine.copies()] == [adapter(2).digest] * 2
    servers[0].faults.append(dies_at("/unload_lora_adapter"))
    engine.unload_adapter("policy-v1")
    assert [set(server.held) for server in servers] == [{"policy-v2"}] * 2


def test_a_request_that_kills_every_server_ends_the_run(build: Build) -> None:
    servers = FakeServer(), FakeServer()
    engine = build(*servers)
    for server in servers:
        server.faults += [dies_at("/generate", lambda body: body["input_ids"][0][0] == 100) for _ in range(3)]
    with pytest.raises(EngineDiedError, match="lost 3 times"):
        list(sample(engine, requests(4, name=None)))


def test_a_server_that_hangs_is_noticed_by_its_progress_and_replaced(build: Build) -> None:
    servers = FakeServer(), FakeServer()
    # Long enough that the other server has answered by then on a machine that others use as well.
    engine = build(*servers, patience=0.5)
    engine.load_adapter("policy-v1", adapter(1))
    servers[0].hangs = True
    asked = requests(8)
    check_whole(asked, list(sample(engine, asked)))
    # The other server may have answered all before this one has ended.
    deadline = time.monotonic() + 30
    while servers[0].starts < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [server.starts for server in servers] == [2, 1]


def test_a_slow_replica_gets_less_and_loses_nothing(build: Build) -> None:
    servers = FakeServer(delay=0.2), FakeServer()
    engine = build(*servers, capacity=4, patience=0.05)
    asked = requests(20, name=None)
    check_whole(asked, list(sample(engine, asked)))
    assert len(servers[0].served) < len(servers[1].served)
    assert servers[0].starts == 1, "slow is not dead"


def test_what_is_no_longer_wanted_is_cancelled(build: Build) -> None:
    server = FakeServer(delay=0.2)
    engine = build(server, capacity=4)
    answers = sample(engine, requests(20, name=None))
    next(answers)
    answers.close()  # type: ignore[attr-defined]
    time.sleep(0.5)
    done = server.calls
    assert done < 5
    check_whole(requests(1, name=None), list(sample(engine, requests(1, name=None))))


# --- answers ---


@pytest.mark.parametrize("fault", [(500, {"error": "oops"}), (503, None), CUT])
def test_a_single_failure_is_asked_again_and_three_end_the_run(build: Build, fault: tuple) -> None:
    server = FakeServer()
    engine = build(server)
    server.faults.append(once("/generate", *fault))
    check_whole(requests(2, name=None), list(sample(engine, requests(2, name=None))))
    assert server.starts == 1, "it is alive and holds all that it should"
    server.faults += [once("/generate", *fault)] * 3
    with pytest.raises(EngineDiedError, match="lost 3 times"):
        list(sample(engine, requests(1, name=None)))


def test_a_refused_adapter_stands_nowhere_and_its_name_is_spent(build: Build) -> None:
    servers = FakeServer(), FakeServer()
    engine = build(*servers)
    servers[1].faults.append(once("/load_lora_adapter", 400, {"error_message": "rank 128 is above 64"}))
    with pytest.raises(GateError, match=r"replica 1 refused adapter policy-v1.*rank 128"):
        engine.load_adapter("policy-v1", adapter(1))
    assert engine.adapters() == ()
    assert [set(server.held) for server in servers] == [set(), set()]
    with pytest.raises(GateError, match="used before"):
        engine.load_adapter("policy-v1", adapter(1))


# --- proofs ---


def prove_on(engine: ServedEngine, version: int, previous: list | None, *, base: float = 0.02) -> list:
    """Against what the fakes compute, so that a healthy one is proven."""
    name, published = f"policy-v{version}", adapter(version)
    healthy = FakeServer()
    on, off = (
        (0.0, *[healthy.logprob(which, at, CANARY[at]) for at in range(1, len(CANARY))]) for which in (name, None)
    )
    trainer = Scored(on, expected_applied_digest(published.files)), Scored(off, None)
    proven = [
        prove(published, name, copy, trainer, CANARY, limits=Limits(1e-3, base),
              previous=previous[index] if previous else None)
        for index, copy in enumerate(engine.copies())
    ]  # fmt: skip
    check_proofs([proof for proof, _ in proven])
    return [reading for _, reading in proven]


@pytest.mark.parametrize("plugin", [True, False])
@pytest.mark.parametrize("kind", ["SGLang", "vLLM"])
def test_a_healthy_publish_is_proven_on_every_copy(build: Build, kind: str, plugin: bool) -> None:
    engine = build(FakeServer(kind, plugin=plugin), FakeServer(kind, plugin=plugin))
    previous = None
    for version in range(5):
        engine.load_adapter(f"policy-v{version}", adapter(version))
        previous = prove_on(engine, version, previous)
        if version:
            engine.unload_adapter(f"policy-v{version - 1}")
        assert all((reading.digest is None) == (kind == "vLLM" or not plugin) for reading in previous)


def planted(engine: ServedEngine, servers: tuple[FakeServer, ...], fault: str, tmp_path: Path) -> None:
    second = servers[1]
    if fault == "stale":
        old = tmp_path / "adapters" / "policy-v1"
        stale = tmp_path / "stale"
        stale.mkdir()
        for file in old.iterdir():
            (stale / file.name).write_bytes(file.read_bytes())
        second.held["policy-v2"] = stale
        second.logprob = lambda adapter, at, token: FakeServer.logprob(  # type: ignore[method-assign]
            second, adapter and "policy-v1", at, token
        )
    elif fault == "base":
        second.base = 0.4
    elif fault == "cache":
        second.shares_cache = True
    elif fault == "evicted":
        del second.held["policy-v1"]


@pytest.mark.parametrize(
    ("fault", "plugin", "says"),
    [
        ("stale", True, "replica 1: .*the server loaded it from .*stale"),
        ("stale", True, "replica 1: .*still holds the previous version's bytes"),
        ("stale", False, "replica 1: .*still samples from the previous version"),
        ("base", True, "replica 1: the engine serves another base.*moved by 0.4"),
        ("base", False, "replica 1: the engine serves another base.*differs from that of the previous publish"),
        ("cache", True, "replica 1: versions share cached keys and values"),
        ("cache", False, "replica 1: versions share cached keys and values"),
        ("evicted", True, "replica 1: policy-v1, which sampled until now.*evicted"),
        ("evicted", False, "replica 1: policy-v1, which sampled until now.*evicted"),
    ],
)
def test_a_fault_of_one_replica_is_named_by_the_next_proof(
    build: Build, tmp_path: Path, fault: str, plugin: bool, says: str
) -> None:
    servers = FakeServer(plugin=plugin), FakeServer(plugin=plugin)
    engine = build(*servers)
    engine.load_adapter("policy-v1", adapter(1))
    previous = prove_on(engine, 1, None)
    engine.load_adapter("policy-v2", adapter(2))
    planted(engine, servers, fault, tmp_path)
    with pytest.raises(GateError, match=says) as caught:
        prove_on(engine, 2, previous)
    assert caught.value.exit_code == 84
    assert "replica 0" not in str(caught.value)


def test_unloading_what_the_server_dropped_by_itself_is_no_failure(build: Build) -> None:
    server = FakeServer()
    engine = build(server)
    engine.load_adapter("policy-v1", adapter(1))
    server.held.clear()
    engine.unload_adapter("policy-v1")
    assert engine.adapters() == ()
    engine.load_adapter("policy-v2", adapter(2))
    server.faults.append(once("/unload_lora_adapter", 400, {"error_message": "busy"}))
    with pytest.raises(GateError, match="busy"):
        engine.unload_adapter("policy-v2")


# --- sleeping ---


def test_every_copy_sleeps_and_wakes_with_what_it_held(build: Build) -> None:
    servers = FakeServer(), FakeServer()
    engine = build(*servers, sleeping=("cache", "weights", "graphs"))
    engine.load_adapter("policy-v1", adapter(1))
    engine.sleep()
    assert [server.asleep for server in servers] == [{"kv_cache", "weights", "cuda_graph"}] * 2
    assert [each.memory_bytes for each in engine.read_servers()] == [5, 5]
    engine.wake()
    assert [each.memory_bytes for each in engine.read_servers()] == [100, 100]
    engine.wake()
    asked = requests(8)
    check_whole(asked, list(sample(engine, asked)))
    assert [server.starts for server in servers] == [1, 1]


def test_a_server_that_dies_in_its_sleep_comes_back_awake(build: Build) -> None:
    servers = FakeServer(), FakeServer()
    engine = build(*servers, sleeping=("cache",))
    engine.load_adapter("policy-v1", adapter(1))
    engine.sleep()
    servers[0].kill()
    engine.wake()
    asked = requests(8)
    check_whole(asked, list(sample(engine, asked)))
    assert (servers[0].starts, servers[1].starts) == (2, 1)
    assert servers[0].held.keys() == {"policy-v1"}


def test_another_adapter_after_a_sleep_is_told(build: Build) -> None:
    engine = build(FakeServer(), FakeServer(forgets_in_sleep=True), sleeping=("cache", "weights"))
    engine.load_adapter("policy-v1", adapter(1))
    engine.sleep()
    with pytest.raises(GateError, match=r"after its sleep replica 1 holds None. as policy-v1, not"):
        engine.wake()


def test_an_engine_that_was_not_made_to_sleep_stays_awake(build: Build) -> None:
    server = FakeServer()
    engine = build(server)
    engine.sleep()
    assert not server.asleep
    engine.wake()
