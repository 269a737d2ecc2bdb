"""Servers that somebody else started: what is wrong with one is said in one error, before anything is trained.

The servers are fakes (`tests/fakes/fake_servers.py`); real SGLang, attached, is in the contract of `tests/engines`.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from fakes.fake_servers import FakeServer, dies_at, once

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.errors import CredentialsError, EngineDiedError, GateError, OrbitError
from orbit_runtime.rollout.attached import AttachedServer, Endpoint, ServerRequirements, attach_engine
from orbit_runtime.rollout.requests import sample
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.sides.engines import endpoint_headers
from orbit_runtime.spec.rollout import Endpoint as EndpointSpec
from orbit_runtime.spec.rollout import Header
from orbit_runtime.types import Sampling
from tests.unit_runtime.rollout.test_served_engine import Words, adapter, check_whole, prove_on, requests

WANTED = ServerRequirements(
    adapter=AdapterConfig(type="LoRA", targets=("q_proj",), rank=8),
    targets=("q_proj",),
    max_tokens=1024,
    sampling=Sampling(),
    architectures=("Qwen3ForCausalLM",),
    probes=((5, 6, 7), (8, 9)),
    tolerance=1e-3,
)


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    made: list[FakeServer] = []
    yield made
    for server in made:
        server.stop()


def attach(
    servers: list[FakeServer], folder: Path, *found: FakeServer, wanted: ServerRequirements = WANTED,
    tokenizer: Words | None = None, **endpoint: Any,
) -> ServedEngine:  # fmt: skip
    for server in found:
        server.start()
        servers.append(server)
    endpoints = [Endpoint(server.url, **endpoint) for server in found]
    return attach_engine(
        endpoints, wanted, tokenizer or Words(), folder=folder / "adapters", max_running_requests=64, attach_seconds=1
    )


def test_tokens_that_only_orbit_writes_out_are_not_compared(servers: list[FakeServer], tmp_path: Path) -> None:
    """Special tokens that calls of tools consist of have a text here, and none on a server."""

    class Marked(Words):
        marker_ids = (7,)

        def decode(self, token_ids: Any) -> str:
            return "".join("<|call|>" if token == 7 else f"word{token}" for token in token_ids)

    engine = attach(servers, tmp_path, FakeServer(), tokenizer=Marked())
    assert len(engine.copies()) == 1
    engine.close()


@pytest.mark.parametrize("kind", ["SGLang", "vLLM"])
def test_an_attached_server_answers_and_is_proven_and_is_never_stopped(
    servers: list[FakeServer], tmp_path: Path, kind: str
) -> None:
    engine = attach(servers, tmp_path, FakeServer(kind), FakeServer(kind))
    engine.load_adapter("policy-v1", adapter(1))
    readings = prove_on(engine, 1, None)
    assert [copy.reads_back for copy in engine.copies()] == [kind == "SGLang"] * 2
    assert all((reading.digest is None) == (kind == "vLLM") for reading in readings)
    asked = requests(12)
    check_whole(asked, list(sample(engine, asked)))
    assert all(server.served for server in servers)
    engine.unload_adapter("policy-v1")
    engine.close()
    assert all(server.is_alive() and not server.held for server in servers)


@pytest.mark.parametrize("kind", ["SGLang", "vLLM"])
def test_no_sampling_setting_is_left_to_the_defaults_of_a_server_or_of_its_model(
    servers: list[FakeServer], tmp_path: Path, kind: str
) -> None:
    """vLLM takes what a request leaves out from the model's generation_config.json: Qwen's cuts to 20 tokens."""
    server, seen = FakeServer(kind), []

    def watch(_: FakeServer, path: str, body: dict[str, Any]) -> None:
        if body.get("stream"):
            seen.extend(body["sampling_params"] if kind == "SGLang" else [body])

    server.faults.append(watch)
    engine = attach(servers, tmp_path, server)
    engine.load_adapter("policy-v1", adapter(1))
    check_whole(asked := requests(4), list(sample(engine, asked)))
    engine.close()
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    assert {tuple(body[name] for name in names) for body in seen} == {(1.0, -1, 1.0, 0.0, 1.0)}


def vllm(**settings: Any) -> FakeServer:
    return FakeServer("vLLM", version="0.32.0", **settings)


ANY = replace(WANTED, engine_version="Any")
OFT = replace(WANTED, adapter=AdapterConfig(type="OFT", targets=("q_proj",)))


@pytest.mark.parametrize(
    ("found", "wanted", "endpoint", "code", "says"),
    [
        ([FakeServer(lora=False)], WANTED, {}, 78, "endpoint 0 .* serves no adapters"),
        ([FakeServer(deterministic=True)], WANTED, {}, 78, "all samples of a prompt would be one and the same"),
        ([FakeServer(rank=4)], WANTED, {}, 78, "up to rank 4, this run's is 8"),
        ([FakeServer(max_tokens=512)], WANTED, {}, 78, "up to 512 tokens, this run's are up to 1024"),
        ([vllm(max_tokens=512)], WANTED, {}, 78, "up to 512 tokens"),
        ([FakeServer(architecture="LlamaForCausalLM")], WANTED, {}, 66, "a LlamaForCausalLM; this run's .* Qwen3For"),
        ([FakeServer(), FakeServer(words="Wort")], WANTED, {}, 66, "endpoint 1 .* another tokenizer.*Wort5"),
        ([vllm(words="Wort")], WANTED, {}, 66, "another tokenizer"),
        ([FakeServer(version="0.5.22")], WANTED, {}, 78, "SGLang 0.5.22 with Orbit's plug-in, .* for SGLang 0.5.23"),
        ([FakeServer(), FakeServer(version="0.5.22")], ANY, {}, 78, "differ in their version: .*0.5.23.*0.5.22"),
        ([FakeServer(unhooked=("a.hook",))], WANTED, {}, 78, "SGLang 0.5.23 has no a.hook that Orbit's plug-in could"),
        ([FakeServer(), vllm()], WANTED, {}, 78, "differ in their kind: .*SGLang.*vLLM"),
        ([FakeServer(), FakeServer(plugin=False)], WANTED, {}, 78, "differ in their plugin"),
        ([FakeServer("else")], WANTED, {}, 78, "neither SGLang nor vLLM"),
        ([FakeServer(plugin=False)], OFT, {}, 78, "serves no OFT: Orbit's plug-in does not run"),
        ([FakeServer()], OFT, {"method": "Upload"}, 78, "goes to SGLang as a folder"),
        ([vllm()], OFT, {}, 78, "vLLM, which serves no OFT"),
        ([vllm()], WANTED, {"method": "Upload"}, 78, "reads adapters from a folder only"),
    ],
)
def test_a_server_that_cannot_serve_the_run_is_refused_with_the_reason(
    servers: list[FakeServer],
    tmp_path: Path,
    found: list[FakeServer],
    wanted: ServerRequirements,
    endpoint: dict,
    code: int,
    says: str,
) -> None:
    if found[0].kind == "else":
        found[0].faults += [once(path, 404, {"detail": "Not Found"}) for path in ("/server_info", "/version")]
        found[0].kind = "SGLang"
    with pytest.raises(OrbitError, match=says) as caught:
        attach(servers, tmp_path, *found, wanted=wanted, **endpoint)
    assert caught.value.exit_code == code
    assert caught.value.fix


@pytest.mark.parametrize(("plugin", "wanted"), [(True, ANY), (False, WANTED)])
def test_another_version_of_sglang_serves_where_it_is_asked_for_or_nothing_is_hooked(
    servers: list[FakeServer], tmp_path: Path, plugin: bool, wanted: ServerRequirements
) -> None:
    attach(servers, tmp_path, FakeServer(version="0.5.22", plugin=plugin), wanted=wanted).close()


@pytest.mark.parametrize("kind", ["SGLang", "vLLM"])
def test_a_server_that_asks_for_a_key_and_other_headers_gets_them_with_every_request(
    servers: list[FakeServer], tmp_path: Path, kind: str
) -> None:
    server = FakeServer(kind, key="s3cret")
    headers = {"Authorization": "Bearer s3cret", "X-Route": "blue"}
    engine = attach(servers, tmp_path, server, headers=headers)
    engine.load_adapter("policy-v1", adapter(1))
    asked = requests(4)
    check_whole(asked, list(sample(engine, asked)))
    engine.close()
    assert len(server.headers_seen) > 4
    assert {seen["X-Route"] for seen in server.headers_seen} == {"blue"}


@pytest.mark.parametrize("kind", ["SGLang", "vLLM"])
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}])
def test_a_key_that_is_missing_or_wrong_is_told_without_showing_it(
    servers: list[FakeServer], tmp_path: Path, kind: str, headers: dict[str, str]
) -> None:
    with pytest.raises(CredentialsError, match=r"127\.0\.0\.1:\d+ refuses this run: /server_info .* 401") as caught:
        attach(servers, tmp_path, FakeServer(kind, key="s3cret"), headers=headers)
    assert caught.value.exit_code == 77
    assert "apiKeyEnv" in str(caught.value.fix)
    assert "wrong" not in str(caught.value)


def test_a_server_that_sends_elsewhere_is_not_followed_there(servers: list[FakeServer], tmp_path: Path) -> None:
    server = FakeServer()
    server.faults += [once("/server_info", 307, {"location": "http://elsewhere/server_info"}) for _ in range(2)]
    server.faults.append(once("/version", 307, {"location": "http://elsewhere/version"}))
    with pytest.raises(OrbitError, match="redirected to http://elsewhere") as caught:
        attach(servers, tmp_path, server, headers={"Authorization": "Bearer s3cret"})
    assert "s3cret" not in str(caught.value)


def test_a_variable_that_is_not_set_is_named_before_anything_is_asked() -> None:
    endpoint = EndpointSpec(
        url="http://engine:30000", api_key_env="ENGINE_KEY", headers=(Header(name="X-Team", value_env="TEAM"),)
    )
    for environment, field, variable in (
        ({"TEAM": "a"}, "apiKeyEnv", "ENGINE_KEY"), ({"ENGINE_KEY": "", "TEAM": "a"}, "apiKeyEnv", "ENGINE_KEY"),
        ({"ENGINE_KEY": "k"}, "headers[0].valueEnv", "TEAM"),
    ):  # fmt: skip
        with pytest.raises(CredentialsError, match=f"{variable} is not set") as caught:
            endpoint_headers("spec.rollout.endpoints[3]", endpoint, environment)
        assert caught.value.where == f"spec.rollout.endpoints[3].{field}"
    found = endpoint_headers("spec.rollout.endpoints[0]", endpoint, {"ENGINE_KEY": "k", "TEAM": "a"})
    assert found == {"X-Team": "a", "Authorization": "Bearer k"}


def test_an_endpoint_that_is_absent_is_named(servers: list[FakeServer], tmp_path: Path) -> None:
    server = FakeServer()
    server.start()
    url = server.url
    server.stop()
    with pytest.raises(EngineDiedError, match=url) as caught:
        attach_engine([Endpoint(url)], WANTED, Words(), folder=tmp_path, max_running_requests=4, attach_seconds=0.1)
    assert (caught.value.exit_code, caught.value.where) == (82, "spec.rollout.endpoints[0]")
    assert "start the server, or correct its address" in str(caught.value.fix)


def test_a_server_that_refuses_connections_is_given_up_sooner_than_one_that_is_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        # It accepts connections and answers none; nothing listens on the other port.
        server = AttachedServer(f"http://127.0.0.1:{silent.getsockname()[1]}", "spec.here", seconds=60)
        threading.Timer(0.3, server.stop).start()
        with pytest.raises(EngineDiedError, match="is not waited for any more"):
            server.start()
    refused = AttachedServer(server.url, "spec.here", seconds=60, refused_seconds=0.3)
    begun = time.monotonic()
    with pytest.raises(EngineDiedError, match="within 0 s: the connection is refused") as caught:
        refused.start()
    assert time.monotonic() - begun < 5
    assert (caught.value.exit_code, caught.value.where) == (82, "spec.here")
    told = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert told
    assert told[0].startswith(f"spec.here: {server.url} does not answer (the connection is refused); waiting for it, 0")


def test_waiting_for_a_lost_server_is_told_and_ends_when_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    lost = AttachedServer(f"http://127.0.0.1:{port}", "spec.here", seconds=60)

    class Well(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

    back: list[HTTPServer] = []

    def come_back() -> None:
        back.append(HTTPServer(("127.0.0.1", port), Well))
        back[0].serve_forever()

    timer = threading.Timer(1.2, come_back)
    timer.start()
    lost.start()
    back[0].shutdown()
    back[0].server_close()
    timer.join()
    told = [record.getMessage() for record in caplog.records if record.name == "orbit.rollout"]
    assert 2 <= len(told) <= 4, "at the beginning, whenever the time has doubled, and at the end"
    assert "at most 60 s" in told[0]
    assert told[-1] == f"spec.here: {lost.url} answers now"


def test_log_probs_from_before_the_temperature_are_noticed(servers: list[FakeServer], tmp_path: Path) -> None:
    cold = replace(WANTED, sampling=Sampling(temperature=0.7))
    attach(servers, tmp_path / "a", vllm(), wanted=cold).close()
    raw = vllm()
    same = {"choices": [{"index": 0, "logprobs": {"top_logprobs": [{"a": -0.5}]}}]}
    raw.faults += [once("/v1/completions", 200, same)] * 2
    with pytest.raises(OrbitError, match="before the temperature") as caught:
        attach(servers, tmp_path / "b", raw, wanted=cold)
    assert caught.value.exit_code == 78


@pytest.mark.parametrize("plugin", [True, False])
def test_an_attached_server_that_was_restarted_by_its_owner_is_filled_again_before_it_gets_work(
    servers: list[FakeServer], tmp_path: Path, plugin: bool
) -> None:
    server = FakeServer(plugin=plugin)
    engine = attach(servers, tmp_path, server)
    engine.load_adapter("policy-v1", adapter(1))
    prove_on(engine, 1, None)
    server.held.clear()
    server.faults.append(once("/generate", 500, None, lambda body: body.get("stream", False)))
    asked = requests(6)
    check_whole(asked, list(sample(engine, asked)))
    assert set(server.held) == {"policy-v1"}
    engine.close()


def test_one_that_came_back_with_another_base_or_version_stops_the_run(
    servers: list[FakeServer], tmp_path: Path
) -> None:
    for change, says in (("base", "gives other log-probs under policy-v1"), ("version", "came back as SGLang 0.6")):
        server = FakeServer(plugin=False)
        engine = attach(servers, tmp_path / change, server)
        engine.load_adapter("policy-v1", adapter(1))
        prove_on(engine, 1, None)
        server.held.clear()
        setattr(server, change, {"base": 0.3, "version": "0.6.0"}[change])
        server.faults.append(once("/generate", 500, None, lambda body: body.get("stream", False)))
        with pytest.raises(GateError, match=says):
            list(sample(engine, requests(2)))
        engine.close()


def test_tensors_go_in_the_request_where_no_folder_is_shared(servers: list[FakeServer], tmp_path: Path) -> None:
    engine = attach(servers, tmp_path, FakeServer(plugin=False), method="Upload")
    engine.load_adapter("policy-v1", adapter(1))
    assert servers[0].held == {"policy-v1": None}
    prove_on(engine, 1, None)
    engine.close()


def test_a_server_that_dies_while_it_is_asked_who_it_is_is_told(servers: list[FakeServer], tmp_path: Path) -> None:
    server = FakeServer()
    server.faults.append(dies_at("/server_info"))
    with pytest.raises(EngineDiedError):
        attach(servers, tmp_path, server)


@pytest.mark.parametrize("kind", ["SGLang", "vLLM"])
def test_a_run_that_goes_on_replaces_what_it_left_there_and_leaves_nothing_at_its_end(
    servers: list[FakeServer], tmp_path: Path, kind: str
) -> None:
    server = FakeServer(kind=kind)
    engine = attach(servers, tmp_path, server, wanted=replace(WANTED, is_resumed=True))
    server.held |= {"policy-v1": Path("left"), "another-runs": Path("stays")}
    engine.load_adapter("policy-v1", adapter(1))
    assert server.held["policy-v1"] == engine.loaded["policy-v1"].files()
    path = "/v1/load_lora_adapter" if kind == "vLLM" else "/load_lora_adapter"
    server.faults.append(once(path, 400, {"error_message": "its rank is too large"}))
    with pytest.raises(GateError, match=r"refused adapter policy-v2: .*its rank is too large"):
        engine.load_adapter("policy-v2", adapter(2))
    engine.close()
    assert server.is_alive()
    assert [*server.held] == ["another-runs"]
