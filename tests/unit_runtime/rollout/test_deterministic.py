"""Deterministic mode: every sample brings its own seed, whoever is asked, and who cannot sample so is refused.

The servers are fakes, whose tokens follow from the seed as SGLang's do; the real mode needs a GPU (`tests/engines`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.fake_servers import FakeServer, dies_at

from orbit_runtime.rollout.replica import Replica
from orbit_runtime.rollout.requests import sample
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.rollout.sglang_api import SGLangApi
from orbit_runtime.rollout.sglang_server import (
    ServerSettings,
    deterministic_attention,
    server_arguments,
)
from orbit_runtime.rollout.transport import FolderMailbox
from orbit_runtime.rollout.wire import Wire, build_client
from orbit_runtime.seeds import stream_key
from orbit_runtime.types import Request
from tests.unit_runtime.rollout.test_served_engine import Words, adapter, check_whole, requests

Build = Callable[..., ServedEngine]
FLAG = "--enable-deterministic-inference"
SETTINGS = ServerSettings(
    model=Path("/model"),
    device="cuda",
    dtype="bfloat16",
    targets=("q_proj",),
    max_running_requests=8,
    max_sequence_length=64,
    seed=0,
)


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    made: list[ServedEngine] = []

    def start(*servers: FakeServer, capacity: int = 64, deterministic: bool = True) -> ServedEngine:
        client = build_client()
        desk = FolderMailbox(tmp_path / str(len(made)))
        engine = ServedEngine(Words(), client, desk=desk, max_running_requests=capacity)
        made.append(engine)
        replicas = []
        for index, server in enumerate(servers):
            server.start()
            api = SGLangApi(Wire(client, server), deterministic=deterministic)
            replicas.append(Replica(f"replica {index}", server, api, engine.loaded, patience=5.0))
        engine.attach(replicas)
        engine.load_adapter("policy-v1", adapter(1))
        return engine

    yield start
    for engine in made:
        engine.close()


def keyed(prompts: int, samples: int = 4) -> list[Request]:
    """With the keys that `environments.turns` gives."""
    return [
        replace(each, key=stream_key(7, "sample", f"p/{each.prompt_ids_T[0]}", 0, each.request_id % samples, 0))
        for each in requests(prompts, samples)
    ]


def recorded(server: FakeServer) -> list[dict]:
    bodies: list[dict] = []
    server.faults.append(lambda _, path, body: bodies.append(body) if path == "/generate" else None)
    return bodies


def tokens(engine: ServedEngine, asked: list[Request]) -> dict[int, tuple[int, ...]]:
    found = list(sample(engine, asked))
    check_whole(sorted(asked, key=lambda each: each.request_id), found)
    return {each.request_id: tuple(each.token_ids_T) for each in found}


def test_every_sample_is_an_entry_with_the_bits_of_its_key_as_seed(build: Build) -> None:
    server = FakeServer(deterministic=True)
    engine = build(server)
    bodies = recorded(server)
    asked = keyed(2, samples=8)
    assert {each.key >= 2**63 for each in asked} == {True, False}, "both halves of the range"
    tokens(engine, asked)
    assert len(bodies) == 2, "the samples of a prompt stay one call"
    seeds: dict[int, int] = {}
    for body in bodies:
        assert len(body["input_ids"]) == len(body["lora_path"]) == 8
        for ids, each in zip(body["input_ids"], body["sampling_params"], strict=True):
            assert -(2**63) <= each["sampling_seed"] < 2**63
            seeds[each["sampling_seed"] % 2**64] = ids[0]
    assert seeds == {each.key: each.prompt_ids_T[0] for each in asked}


@pytest.mark.parametrize("samples", [1, 4])
def test_without_the_mode_no_request_holds_a_seed(build: Build, samples: int) -> None:
    server = FakeServer()
    engine = build(server, deterministic=False)
    bodies = recorded(server)
    tokens(engine, keyed(3, samples))
    for body in bodies:
        assert all("sampling_seed" not in each for each in body["sampling_params"])
    assert sum(len(body["sampling_params"]) for body in bodies) == 3 * samples


def test_completions_depend_on_no_order_no_neighbour_and_no_server(build: Build) -> None:
    asked = keyed(6)
    first = tokens(build(FakeServer(deterministic=True)), asked)
    assert len(set(first.values())) == len(asked), "no two samples are equal"
    mixed = random.Random(3).sample(asked, len(asked))
    assert tokens(build(FakeServer(deterministic=True), capacity=3), mixed) == first
    assert tokens(build(FakeServer(deterministic=True), FakeServer(deterministic=True)), mixed) == first
    alone = build(FakeServer(deterministic=True))
    for request in asked[::5]:
        assert tokens(alone, [request]) == {request.request_id: first[request.request_id]}


def test_a_rollout_that_is_asked_again_elsewhere_has_the_same_tokens(build: Build) -> None:
    asked = keyed(12)
    first = tokens(build(FakeServer(deterministic=True)), asked)
    assert len(set(first.values())) == len(asked)
    servers = FakeServer(deterministic=True, delay=0.01), FakeServer(deterministic=True, delay=0.01)
    engine = build(*servers, capacity=8)
    servers[0].faults.append(dies_at("/generate"))
    assert tokens(engine, asked) == first
    assert servers[0].starts == 2


def test_the_flag_is_given_where_the_run_asks_for_it() -> None:
    assert FLAG in server_arguments(replace(SETTINGS, deterministic=True), 1)
    assert FLAG not in server_arguments(SETTINGS, 1)
    # SGLang then refuses its CPU attention by itself.
    assert FLAG in server_arguments(replace(SETTINGS, device="cpu", deterministic=True), 1)


def test_attention_is_chosen_where_sglangs_own_choice_would_not_start() -> None:
    for family in ("gpt_oss", "deepseek_v3", "kimi_k2"):
        assert deterministic_attention(family, (10, 0)) == "triton"
        assert deterministic_attention(family, (9, 0)) is None
    assert deterministic_attention("qwen3_moe", (10, 0)) is None
    on_gpu = replace(SETTINGS, device="cuda", deterministic=True)
    assert "--attention-backend" not in server_arguments(on_gpu, 1)
    given = server_arguments(replace(on_gpu, attention="triton"), 1)
    assert given[given.index("--attention-backend") + 1] == "triton"
