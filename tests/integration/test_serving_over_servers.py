"""`orbit serve` in front of servers, and what they do wrong: fakes over real HTTP, asked by the `openai` client.

A real SGLang behind it is in `tests/engines/test_serving.py`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from fakes.fake_servers import CUT, Events, FakeServer, once
from safetensors.torch import save

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.rollout.replica import Replica
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.rollout.sglang_api import SGLangApi
from orbit_runtime.rollout.transport import FolderMailbox
from orbit_runtime.rollout.wire import Wire, build_client
from orbit_runtime.serve.open import ServedModels
from orbit_runtime.serve.policies import Base, Policies
from orbit_runtime.serve.requests import ServeLimits
from orbit_runtime.serve.server import RunningServer, start_serving

MESSAGES: Any = [{"role": "user", "content": "12+34="}]
VOCABULARY = 104
FOLDER = builtin_folder("tiny-adder", "INT4")


@dataclass(frozen=True)
class Front:
    serving: RunningServer
    server: FakeServer
    client: openai.OpenAI
    engine: ServedEngine
    folder: Path
    """Adapters are loaded from there."""

    @property
    def url(self) -> str:
        return self.serving.url

    def load(self, folder: Path, model: str = "policy") -> httpx.Response:
        return httpx.post(f"{self.url}/update_weights", json={"adapter": str(folder), "model": model}, timeout=60)


def write_adapter(folder: Path, value: float, *, rank: int = 2) -> Path:
    folder.mkdir()
    tensors = {
        "base_model.model.x.lora_A.weight": torch.full((rank, 4), value),
        "base_model.model.x.lora_B.weight": torch.full((4, rank), value),
    }
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2, "use_rslora": False, "target_modules": ["x"]}
    (folder / "adapter_model.safetensors").write_bytes(save(tensors))
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def front_of(server: FakeServer, folder: Path) -> Iterator[Front]:
    tokenizer = ChatTokenizer(FOLDER)
    client = build_client()
    engine = ServedEngine(tokenizer, client, desk=FolderMailbox(folder / "handed"), max_running_requests=64)
    server.start()
    wire = Wire(client, server)
    engine.attach([Replica("the engine", server, SGLangApi(wire), engine.loaded, patience=5)])
    config = AdapterConfig(type="LoRA", targets=("x",), rank=2, alpha=2.0)
    base = Base("base", "builtin://tiny-adder", tokenizer, config, "tree:0", VOCABULARY, "float32", None, 3)
    policies = Policies(base, engine, [str(folder)])
    policies.load("policy", str(write_adapter(folder / "first", 1.0)))
    opened = ServedModels(policies, engine, ServeLimits(drain_seconds=0.5), FOLDER, "SGLang", watch=engine.revive)
    serving = start_serving(opened, "127.0.0.1", 0, None)
    try:
        with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="x", max_retries=0, timeout=30) as api:
            yield Front(serving, server, api, engine, folder)
    finally:
        serving.close()
        engine.close()


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front_of(FakeServer(), tmp_path_factory.mktemp("front")) as front:
        yield front


@pytest.fixture(autouse=True)
def _healthy(request: pytest.FixtureRequest) -> None:
    if "front" in request.fixturenames:
        server = request.getfixturevalue("front").server
        server.faults.clear()
        server.piece_seconds = 0.0


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def logprobs(front: Front, model: str, tokens: int, **more: Any) -> list[float]:
    answer = front.client.completions.create(model=model, prompt=[5, 6], max_tokens=tokens, logprobs=0, **more)
    return list(answer.choices[0].logprobs.token_logprobs)  # type: ignore[union-attr]


def expected(front: Front, slot: str | None, tokens: int) -> Any:
    return pytest.approx([front.server.logprob(slot, 2 + at, at) for at in range(tokens)], abs=1e-6)


def test_names_are_slots_of_the_servers(front: Front) -> None:
    assert [model.id for model in front.client.models.list()] == ["base", "policy"]
    (slot,) = front.engine.adapters()
    assert logprobs(front, "policy", 6) == expected(front, slot, 6)
    assert logprobs(front, "base", 6) == expected(front, None, 6)


def test_a_whole_model_is_refused_because_servers_hold_the_base(front: Front) -> None:
    said = httpx.post(f"{front.serving.url}/update_weights", json={"checkpoint": str(front.folder)}, timeout=30)
    assert (said.status_code, said.json()["error"]["code"]) == (400, "unsupported")
    assert "orbit serve --model FOLDER --engine SGLang" in said.json()["error"]["message"]


def test_a_stream_tells_tokens_as_they_come_and_what_the_whole_answer_tells(front: Front) -> None:
    front.server.piece_seconds = 0.02
    started = time.monotonic()
    stream = front.client.completions.create(
        model="policy", prompt=[5, 6], max_tokens=40, n=2, logprobs=0, stream=True, temperature=1.0
    )
    seen: dict[int, list[float]] = {0: [], 1: []}
    first = 0.0
    for chunk in stream:
        for choice in chunk.choices:
            first = first or time.monotonic() - started
            seen[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
    assert first < (time.monotonic() - started) / 2, "it came before the answer had ended"
    (slot,) = front.engine.adapters()
    assert seen[0] == seen[1] == expected(front, slot, 40)


def test_alternatives_come_from_the_servers_streamed_and_whole(front: Front) -> None:
    options: Any = {"model": "policy", "prompt": [5, 6], "max_tokens": 9, "logprobs": 2}
    whole = front.client.completions.create(**options).choices[0].logprobs
    assert whole is not None
    assert whole.top_logprobs is not None
    assert [len(each) for each in whole.top_logprobs] == [2] * 9
    for token, logprob, others in zip(whole.tokens or (), whole.token_logprobs or (), whole.top_logprobs, strict=True):
        assert others[token] == logprob == max(others.values())
    streamed = [
        each
        for chunk in front.client.completions.create(**options, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for each in choice.logprobs.top_logprobs or ()
    ]
    assert streamed == whole.top_logprobs


def says(text: str) -> Callable[[FakeServer, str, dict], Any]:
    """One request is answered with this text, token by token."""
    ids = ChatTokenizer(FOLDER).encode_text(text)

    def events(rid: str) -> Iterator[dict]:
        for at, token in enumerate(ids):
            reason = {"type": "length"} if at == len(ids) - 1 else None
            told = {"id": rid, "completion_tokens": at + 1, "output_token_logprobs": [[-1.0, token, None]]}
            yield {"index": 0, "meta_info": {**told, "finish_reason": reason}}

    return lambda _, path, body: (200, Events(events(body["rid"][0]))) if path == "/generate" else None


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_tool_goes_out_and_its_answer_comes_back_in(front: Front, stream: bool) -> None:
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = '<tool_call>{"name": "add", "arguments": {"a": 12}}</tool_call>'
    options: Any = {"model": "policy", "messages": MESSAGES, "tools": tools, "max_tokens": 90}
    front.server.faults.append(says(call))
    if stream:
        deltas = [c.choices[0].delta for c in front.client.chat.completions.create(**options, stream=True)]
        assert not any(delta.content for delta in deltas)
        (made,) = [each for delta in deltas for each in delta.tool_calls or ()]
    else:
        (made,) = front.client.chat.completions.create(**options).choices[0].message.tool_calls or ()
    assert made.function is not None
    assert (made.function.name, json.loads(made.function.arguments or "")) == ("add", {"a": 12})
    said = {"id": made.id, "type": "function", "function": {"name": "add", "arguments": made.function.arguments}}
    later = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [said]},
        {"role": "tool", "tool_call_id": made.id, "content": "46"},
    ]
    assert front.client.chat.completions.create(**{**options, "messages": later, "max_tokens": 2}).choices
    prompt = ChatTokenizer(FOLDER).decode_all(front.server.served[-1])
    assert '{"name": "add", "arguments": {"a": 12}}' in prompt
    assert prompt.index("add") < prompt.index("46")
    front.server.faults.append(says(call))
    plain = front.client.chat.completions.create(**options, tool_choice="none").choices[0].message
    assert (plain.content, plain.tool_calls) == (call, None)


def test_a_request_that_is_not_streamed_asks_for_few_events_and_a_streamed_one_for_each_token(front: Front) -> None:
    intervals: list[int] = []

    def note(_: FakeServer, path: str, body: dict) -> None:
        if path == "/generate" and body.get("stream"):
            intervals.extend(each["stream_interval"] for each in body["sampling_params"])

    front.server.faults.append(note)
    logprobs(front, "policy", 4)
    [*front.client.completions.create(model="policy", prompt=[5, 6], max_tokens=4, stream=True)]
    assert intervals == [64, 1]


def test_a_server_that_is_lost_in_the_middle_of_a_stream_costs_no_token(front: Front) -> None:
    front.server.piece_seconds = 0.02
    starts = front.server.starts
    stream = iter(
        front.client.completions.create(model="policy", prompt=[5, 6], max_tokens=40, logprobs=0, stream=True)
    )
    seen = list(next(stream).choices[0].logprobs.token_logprobs)  # type: ignore[union-attr]
    threading.Thread(target=front.server.kill).start()
    reasons = []
    for chunk in stream:
        for choice in chunk.choices:
            seen += choice.logprobs.token_logprobs if choice.logprobs else []
            reasons.append(choice.finish_reason)
    assert (len(seen), reasons[-1]) == (40, "length")
    assert front.server.starts == starts + 1


def test_a_server_that_dies_while_nobody_asks_is_back_before_somebody_does(front: Front) -> None:
    starts = front.server.starts
    front.server.kill()
    until(lambda: (front.serving.check(), front.server.starts == starts + 1 and front.engine.replicas[0].is_up)[1])
    (slot,) = front.engine.adapters()
    assert slot in front.server.held
    assert logprobs(front, "policy", 2) == expected(front, slot, 2)


def test_a_client_that_leaves_ends_its_request_at_the_server(front: Front) -> None:
    front.server.piece_seconds = 0.05
    front.server.aborted.clear()
    with httpx.stream(
        "POST", f"{front.url}/v1/completions", timeout=30,
        json={"model": "policy", "prompt": [5, 6], "max_tokens": 90, "n": 3, "stream": True},
    ) as answer:  # fmt: skip
        next(answer.iter_lines())
    until(lambda: len(front.server.aborted) == 3)


def test_weights_change_with_proof_and_what_is_not_proven_leaves_the_old_policy(front: Front) -> None:
    (before,) = front.engine.adapters()
    other = write_adapter(front.folder / "other", 2.0)
    front.server.faults.append(once("/load_lora_adapter", 400, {"error": "no room"}))
    assert front.load(other).status_code == 422
    told = {"version": 4, "unhooked": [], "adapters": {"policy-3": {"slot_digest": "tree:0", "applied_digest": None}}}
    wrong = {"version": "0.5.23", "internal_states": [{"orbit": told}]}
    front.server.faults.append(once("/server_info", 200, wrong))
    answer = front.load(other)
    assert answer.status_code == 422, answer.text
    assert "could not be proven live" in answer.json()["error"]["message"]
    assert front.engine.adapters() == (before,)
    assert logprobs(front, "policy", 3) == expected(front, before, 3)
    answer = front.load(other)
    assert answer.status_code == 200, answer.text
    proof = answer.json()["proof"]
    assert (proof["verdict"], proof["slot_digest"]) == ("proven", answer.json()["digest"])
    until(lambda: len(front.engine.adapters()) == 1 and front.engine.adapters() != (before,))
    assert logprobs(front, "policy", 3) == expected(front, front.engine.adapters()[0], 3)
    assert front.load(write_adapter(front.folder / "wide", 1.0, rank=4)).status_code == 422
    assert httpx.post(f"{front.url}/reload_weights").status_code == 200
    assert logprobs(front, "policy", 3) == expected(front, None, 3)
    assert front.load(front.folder / "first").status_code == 200


def test_a_request_under_way_ends_under_the_adapter_that_it_began_with(front: Front) -> None:
    front.server.piece_seconds = 0.05
    (before,) = front.engine.adapters()
    stream = iter(
        front.client.completions.create(model="policy", prompt=[5, 6], max_tokens=30, logprobs=0, stream=True)
    )
    seen = list(next(stream).choices[0].logprobs.token_logprobs)  # type: ignore[union-attr]
    assert front.load(write_adapter(front.folder / "later", 3.0)).status_code == 200
    assert len(front.engine.adapters()) == 2
    for chunk in stream:
        for choice in chunk.choices:
            seen += choice.logprobs.token_logprobs if choice.logprobs else []
    assert seen == expected(front, before, 30)
    # Its place is given back with the next completion that ends.
    logprobs(front, "policy", 1)
    until(lambda: before not in front.server.held)


def test_an_answer_names_the_adapter_that_it_was_sampled_from_while_the_one_before_is_unloaded(front: Front) -> None:
    is_gone = threading.Event()

    def unload_slowly(_: FakeServer, path: str, body: dict) -> None:
        if path == "/unload_lora_adapter":
            is_gone.wait(20)

    front.server.faults.append(unload_slowly)
    digest = front.load(write_adapter(front.folder / "next", 4.0)).json()["digest"]
    slot = front.engine.adapters()[-1]
    body = {"model": "policy", "prompt": [5, 6], "max_tokens": 3, "logprobs": 0}
    answer = httpx.post(f"{front.url}/v1/completions", json=body, timeout=30)
    assert len(front.server.held) == 2, "the one before is still there"
    assert json.loads(answer.headers["orbit-policy"])["digest"] == digest
    assert answer.json()["choices"][0]["logprobs"]["token_logprobs"] == expected(front, slot, 3)
    is_gone.set()
    until(lambda: len(front.server.held) == 1)


def test_more_adapters_than_servers_hold_are_refused_and_none_is_lost(front: Front) -> None:
    assert front.load(front.folder / "first", "second").status_code == 200
    assert front.load(front.folder / "first", "third").status_code == 200
    answer = front.load(front.folder / "first", "fourth")
    assert (answer.status_code, "as many as it can" in answer.json()["error"]["message"]) == (422, True)
    assert {"base", "policy", "second", "third"} == {model.id for model in front.client.models.list()}
    for name in ("second", "third"):
        assert httpx.post(f"{front.url}/reload_weights", json={"model": name}).status_code == 200


@pytest.mark.parametrize(("field", "value"), [("seed", 3), ("repetition_penalty", 1.2)])
def test_what_the_servers_do_not_give_is_refused_by_name(front: Front, field: str, value: float) -> None:
    body = {"model": "policy", "messages": MESSAGES, "max_tokens": 2, field: value}
    answer = httpx.post(f"{front.url}/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_an_answer_that_fits_no_request_fails_that_request_alone(front: Front) -> None:
    front.server.faults.append(once("/generate", 400, {"error": "no"}, when=lambda body: bool(body.get("stream"))))
    with pytest.raises(openai.APIStatusError) as caught:
        logprobs(front, "policy", 2)
    assert caught.value.status_code >= 500
    assert len(logprobs(front, "policy", 2)) == 2
    assert httpx.get(f"{front.url}/health").status_code == 200


def test_servers_that_do_not_come_back_end_every_request_with_503(tmp_path: Path) -> None:
    with front_of(FakeServer(), tmp_path) as front:
        front.server.refuses_to_start = True
        front.server.faults.append(lambda *_: CUT)
        front.server.kill()
        with pytest.raises(openai.InternalServerError) as caught:
            logprobs(front, "policy", 2)
        assert caught.value.status_code == 503
        assert httpx.get(f"{front.url}/health").status_code == 503
