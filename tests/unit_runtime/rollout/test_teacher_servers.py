"""A teacher behind endpoints: what it answers, and what becomes of a server that is lost or answers nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orbit_runtime.errors import CredentialsError, EngineDiedError, GateError, ModelError, OrbitError, UnsupportedError
from orbit_runtime.rollout.attached import Endpoint, ServerRequirements, attach_engine
from orbit_runtime.rollout.teacher_servers import SEQUENCES, ServedTeacher
from orbit_runtime.sides.teacher import ENDPOINTS
from orbit_runtime.types import Sampling
from tests.fakes.fake_servers import CUT, FakeServer, dies_at, once
from tests.unit_runtime.rollout.test_served_engine import Words

WANTED = ServerRequirements(
    adapter=None, max_tokens=1025, sampling=Sampling(), probes=((5, 6, 7), (8, 9)), where=ENDPOINTS, who="teacher"
)
TOKENS = (5, 6, 7, 8, 9, 3)


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    made: list[FakeServer] = []
    yield made
    for server in made:
        server.stop()


def teacher(servers: list[FakeServer], *found: FakeServer, wanted: ServerRequirements = WANTED) -> ServedTeacher:
    for server in found:
        server.start()
        servers.append(server)
    endpoints = [Endpoint(server.url, "Folder") for server in found]
    engine = attach_engine(endpoints, wanted, Words(), folder=Path(), max_running_requests=64, attach_seconds=1)
    return ServedTeacher(engine, ENDPOINTS)


def vllm(**fields: object) -> FakeServer:
    return FakeServer(kind="vLLM", version="0.32.0", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [FakeServer, vllm], ids=["SGLang", "vLLM"])
def test_a_server_of_any_architecture_without_lora_tells_its_own_log_probs(
    servers: list[FakeServer], make: type[FakeServer]
) -> None:
    server = make(lora=False, architecture="Glm4MoeForCausalLM", plugin=False, deterministic=True)
    asked = teacher(servers, server)
    found = asyncio.run(asked.logprobs(TOKENS))
    expected = [0.0, *(server.logprob(None, at, TOKENS[at]) for at in range(1, len(TOKENS)))]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    asked.engine.close()


def test_many_sequences_are_spread_over_the_servers(servers: list[FakeServer]) -> None:
    two = (FakeServer(delay=0.02), FakeServer(delay=0.02))
    counted = [0, 0]

    def count(index: int):  # type: ignore[no-untyped-def]
        def seen(_: FakeServer, path: str, body: dict) -> None:
            counted[index] += path == "/generate"

        return seen

    asked = teacher(servers, *two)
    for index, server in enumerate(two):
        server.faults.append(count(index))

    async def many() -> None:
        await asyncio.gather(*(asked.logprobs((5, 6, each % 50)) for each in range(4 * SEQUENCES)))

    asyncio.run(many())
    assert sum(counted) == 4 * SEQUENCES
    assert min(counted) > SEQUENCES
    asked.engine.close()


def test_a_server_that_dies_is_waited_for_while_another_answers(servers: list[FakeServer]) -> None:
    two = (FakeServer(), FakeServer())
    asked = teacher(servers, *two)
    two[0].faults.append(dies_at("/generate"))
    found = [asyncio.run(asked.logprobs(TOKENS)) for _ in range(3)]
    assert found[0] == found[1] == found[2]
    asked.engine.close()


def test_a_slow_teacher_is_waited_for_and_asked_once(servers: list[FakeServer]) -> None:
    server, paths = FakeServer(), list[str]()
    asked = teacher(servers, server)
    (replica,) = asked.engine.replicas
    replica._patience, server.delay = 0.05, 0.5
    server.faults.append(lambda _, path, body: paths.append(path))
    assert asyncio.run(asked.logprobs(TOKENS))[1] == pytest.approx(server.logprob(None, 1, 6))
    assert paths.count("/generate") == 1
    assert paths.count("/health_generate") > 1, "and looked after meanwhile"
    asked.engine.close()


def test_a_teacher_that_hangs_ends_the_run_with_82(servers: list[FakeServer]) -> None:
    server = FakeServer()
    asked = teacher(servers, server)
    (replica,) = asked.engine.replicas
    # It is waited for as long as a server takes to start; here, a second.
    replica._patience, replica.server._seconds, server.hangs = 0.05, 1.0, True
    with pytest.raises(EngineDiedError, match="did not answer within 1 s") as caught:
        asyncio.run(asked.logprobs(TOKENS))
    assert caught.value.exit_code == 82
    asked.engine.close()


def test_a_request_that_is_cut_off_is_asked_again(servers: list[FakeServer]) -> None:
    server = FakeServer()
    asked = teacher(servers, server)
    server.faults.append(lambda _, path, body: CUT if path == "/generate" else None)
    assert asyncio.run(asked.logprobs(TOKENS))[1] == pytest.approx(server.logprob(None, 1, 6))
    asked.engine.close()


def test_a_request_that_no_server_survives_ends_the_run(servers: list[FakeServer]) -> None:
    server = FakeServer()
    asked = teacher(servers, server)
    server.faults += [once("/generate", 500, {"error": "out of memory"}) for _ in range(3)]
    with pytest.raises(EngineDiedError, match=r"teacher 0 .* was lost 3 times: .*out of memory") as caught:
        asyncio.run(asked.logprobs(TOKENS))
    assert caught.value.exit_code == 82
    asked.engine.close()


@pytest.mark.parametrize("bad", [-1e30, -20_000.0])
def test_an_impossible_token_is_named(servers: list[FakeServer], bad: float) -> None:
    class Sure(FakeServer):
        def logprob(self, adapter: str | None, position: int, token: int) -> float:
            return bad if position == 4 else -0.5

    asked = teacher(servers, Sure())
    with pytest.raises(GateError, match=r"log-prob of token 4 of an answer is .*: 9 after \[5, 6, 7, 8\]") as caught:
        asyncio.run(asked.logprobs(TOKENS))
    assert (caught.value.exit_code, caught.value.where) == (84, ENDPOINTS)
    asked.engine.close()


def refused(servers: list[FakeServer], *found: FakeServer, wanted: ServerRequirements = WANTED) -> OrbitError:
    with pytest.raises(OrbitError) as caught:
        teacher(servers, *found, wanted=wanted)
    return caught.value


def test_what_cannot_teach_is_refused_where_the_manifest_names_it(servers: list[FakeServer]) -> None:
    other = refused(servers, FakeServer(words="other"))
    assert isinstance(other, ModelError)
    assert "has another tokenizer" in str(other)
    assert "it is sent token ids" in str(other.fix)
    locked = refused(servers, FakeServer(key="secret"))
    assert isinstance(locked, CredentialsError)
    short = refused(servers, FakeServer(max_tokens=1024))
    assert isinstance(short, UnsupportedError)
    assert "up to 1024 tokens, this run's are up to 1025" in str(short)
    mixed = refused(servers, FakeServer(), vllm())
    assert isinstance(mixed, UnsupportedError)
    assert [each.where for each in (other, locked, mixed)] == [f"{ENDPOINTS}[0]", f"{ENDPOINTS}[0]", ENDPOINTS]


def test_servers_of_a_teacher_are_not_asked_for_adapters(servers: list[FakeServer]) -> None:
    server = FakeServer(lora=False)
    refused(servers, server, wanted=replace(WANTED, max_tokens=10**6))
    asked = teacher(servers, FakeServer(lora=False))
    assert asked.engine.adapters() == ()
    asked.engine.close()
