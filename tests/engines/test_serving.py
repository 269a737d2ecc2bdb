"""`orbit serve` in front of a real SGLang server: a run's base and adapter, asked by the official `openai` client."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from openai.types.chat import ChatCompletion

from orbit_runtime.loop import run
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.policy.packed import Branch
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.serve.open import ServedModels, ServeRequest, open_models
from orbit_runtime.serve.requests import ServeLimits
from orbit_runtime.serve.server import RunningServer, start_serving
from orbit_runtime.spec import OrbitRun
from tests.engines.servers import server_of
from tests.integration.killing import small_manifest

MESSAGES: Any = [{"role": "user", "content": "12+34="}]
KEY = "ORBIT_TEST_SGLANG_KEY"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    manifest = small_manifest(steps=2)
    manifest["spec"]["model"]["maxSequenceLength"] = 256
    manifest["spec"]["training"]["learningRate"] = 0.05
    run(OrbitRun.model_validate(manifest), out=str(folder), progress=SilentProgress())
    return folder


@pytest.fixture(scope="module")
def opened(trained: Path) -> Iterator[ServedModels]:
    opened = open_models(ServeRequest(str(trained), engine="SGLang"), ServeLimits(), lambda _: None)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def serving(opened: ServedModels) -> Iterator[RunningServer]:
    serving = start_serving(opened, "127.0.0.1", 0, None)
    yield serving
    serving.close()


@pytest.fixture(scope="module")
def client(serving: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def under_way(serving: RunningServer) -> float:
    lines = httpx.get(f"{serving.url}/metrics").text.splitlines()
    (line,) = [each for each in lines if each.startswith("orbit_serve_completions_under_way ")]
    return float(line.split()[-1])


def scored(trained: Path, answer: ChatCompletion) -> list[list[float]]:
    """Log-probs of the answers' tokens by this process's own model, which no server has anything to do with."""
    torch_side = open_models(ServeRequest(str(trained), engine="Torch"), ServeLimits(), lambda _: None)
    base = torch_side.policies.base
    assert base.policy is not None
    prompt = tuple(base.tokenizer.encode_chat(MESSAGES))
    served = torch_side.policies.find("policy")
    assert served is not None
    found = []
    for choice in answer.choices:
        assert choice.logprobs is not None
        text = "".join(token.token for token in choice.logprobs.content or ())
        ids = tuple(base.tokenizer.encode_text(text))
        assert len(ids) == len(choice.logprobs.content or ())
        with torch.no_grad(), base.policy.injected.selection.use(served.slot):
            found.append(base.policy.logprobs(base.policy.pack([Branch(0, prompt, ids)]))[0].tolist())
    torch_side.close()
    return found


def test_a_run_is_served_over_sglang(
    trained: Path, opened: ServedModels, serving: RunningServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server for all of it: it takes longer to start than everything here together."""
    assert [model.id for model in client.models.list()] == ["tiny-adder", "policy"]
    sampled = client.chat.completions.create(
        model="policy", messages=MESSAGES, n=3, max_tokens=5, logprobs=True, extra_body={"ignore_eos": True}
    )
    told = [[token.logprob for token in choice.logprobs.content] for choice in sampled.choices]  # type: ignore[union-attr]
    for found, expected in zip(told, scored(trained, sampled), strict=True):
        assert found == pytest.approx(expected, abs=1e-3)
    check_streams(client)
    check_refusals(client)
    check_changes(trained, serving, client)
    check_leaving(serving)
    check_attached(trained, opened, monkeypatch, greedy(client))


def greedy(client: openai.OpenAI, model: str = "policy", **more: Any) -> Any:
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, temperature=0, max_tokens=6, logprobs=True, **more
    )
    return [(token.token, pytest.approx(token.logprob, abs=1e-3)) for token in answer.choices[0].logprobs.content]  # type: ignore[union-attr]


def check_streams(client: openai.OpenAI) -> None:
    options: Mapping[str, Any] = {"model": "policy", "messages": MESSAGES, "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(**options, extra_body={"ignore_eos": True})
    chunks = [*client.chat.completions.create(**options, extra_body={"ignore_eos": True}, stream=True)]
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert sum(map(bool, pieces)) > 20, "it comes token by token, not at the end"
    text = whole.choices[0].message.content or ""
    cut = client.chat.completions.create(**options, stop=text[2:4])
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == (text[: text.index(text[2:4])], "stop")


def check_refusals(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="seed"):
        client.chat.completions.create(model="policy", messages=MESSAGES, seed=1)
    with pytest.raises(openai.BadRequestError, match="repetition"):
        client.chat.completions.create(model="policy", messages=MESSAGES, extra_body={"repetition_penalty": 1.1})
    assert client.chat.completions.create(model="policy", messages=MESSAGES, seed=1, temperature=0).choices


def check_changes(trained: Path, serving: RunningServer, client: openai.OpenAI) -> None:
    base, newest = greedy(client, "tiny-adder"), greedy(client)
    assert newest != base
    damaged = trained / "damaged"
    folder = trained / "adapters" / "policy-v1"
    damaged.mkdir()
    for file in folder.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    facts = json.loads((damaged / "manifest.json").read_text())
    facts["facts"]["canary"]["logprobs"] = [each - 1.0 for each in facts["facts"]["canary"]["logprobs"]]
    (damaged / "manifest.json").write_text(json.dumps(facts))
    refused = httpx.post(f"{serving.url}/update_weights", json={"adapter": str(damaged)}, timeout=60)
    assert refused.status_code == 422, refused.text
    assert greedy(client) == newest
    said = httpx.post(f"{serving.url}/update_weights", json={"adapter": str(folder)}, timeout=60)
    assert said.status_code == 200, said.text
    assert (said.json()["policy_version"], said.json()["proof"]["verdict"]) == (1, "proven")
    assert greedy(client) != newest
    # Of another library: nobody wrote down what it does. What stands in the server is the proof.
    foreign = trained / "foreign"
    foreign.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (foreign / name).write_bytes((trained / "adapters" / "policy-v2" / name).read_bytes())
    said = httpx.post(f"{serving.url}/update_weights", json={"adapter": str(foreign)}, timeout=60)
    assert said.status_code == 200, said.text
    assert said.json()["proof"]["slot_digest"] == said.json()["digest"]
    assert greedy(client) == newest
    assert httpx.post(f"{serving.url}/reload_weights", timeout=60).status_code == 200
    assert greedy(client) == base
    assert httpx.post(f"{serving.url}/update_weights", json={"adapter": str(trained)}, timeout=60).status_code == 200
    assert greedy(client) == newest


def check_leaving(serving: RunningServer) -> None:
    body = json.dumps(
        {"model": "policy", "prompt": "1+1=", "max_tokens": 200, "n": 4, "ignore_eos": True, "stream": True}
    ).encode()
    host, port = serving.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        until(lambda: under_way(serving) == 4)
        connection.recv(1)
    until(lambda: under_way(serving) == 0)


def check_attached(trained: Path, opened: ServedModels, monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    """The same server once more, as one that somebody else started: a manifest's endpoint."""
    assert isinstance(opened.engine, ServedEngine)
    server = server_of(opened.engine)
    monkeypatch.setenv(KEY, server.headers["Authorization"].removeprefix("Bearer "))
    manifest = small_manifest(steps=2)
    manifest["spec"]["model"]["maxSequenceLength"] = 256
    manifest["spec"]["rollout"] |= {"engine": "OpenAI", "endpoints": [{"url": server.url, "apiKeyEnv": KEY}]}
    file = trained / "attached.json"
    file.write_text(json.dumps(manifest))
    attached = open_models(ServeRequest(str(file), adapters={"policy": str(trained)}), ServeLimits(), lambda _: None)
    other = start_serving(attached, "127.0.0.1", 0, None)
    with openai.OpenAI(base_url=f"{other.url}/v1", api_key="unused", max_retries=0) as client:
        assert greedy(client) == expected
    other.close()
    attached.close()


def test_a_server_that_is_killed_comes_back_and_the_stream_goes_on(
    trained: Path, opened: ServedModels, serving: RunningServer, client: openai.OpenAI
) -> None:
    assert isinstance(opened.engine, ServedEngine)
    options: Mapping[str, Any] = {"model": "policy", "messages": MESSAGES, "temperature": 0, "max_tokens": 150}
    whole = client.chat.completions.create(**options, extra_body={"ignore_eos": True}).choices[0].message.content
    text = ""
    pieces = iter(client.chat.completions.create(**options, extra_body={"ignore_eos": True}, stream=True))
    while len(text) < 20:
        text += next(pieces).choices[0].delta.content or ""
    os.killpg(server_of(opened.engine).pid, signal.SIGKILL)
    text += "".join(choice.delta.content or "" for chunk in pieces for choice in chunk.choices)
    assert text == whole
    os.killpg(server_of(opened.engine).pid, signal.SIGKILL)
    # Nobody asks it; whoever waits for the end of the serving finds it dead.
    (replica,) = opened.engine.replicas
    until(lambda: (serving.check(), replica.restarts == 2)[1], seconds=300)
    assert greedy(client)
