"""A real server over a real run's adapter, asked by the official `openai` client and by raw bytes."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest

from orbit_runtime.errors import EngineDiedError
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.rollout.requests import sample
from orbit_runtime.serve.open import ServedModels, ServeRequest, open_models
from orbit_runtime.serve.requests import ServeLimits, choice_key
from orbit_runtime.serve.server import RunningServer, start_serving
from orbit_runtime.types import Request, Sampling

TOKEN = "a-token-of-tests"
MESSAGES = [{"role": "user", "content": "12+34="}]
MODELS = ("tiny-adder", "policy")


@pytest.fixture(scope="module")
def opened(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> ServedModels:
    return open_models(ServeRequest(str(trained)), ServeLimits(max_tokens=400, concurrent=64), lambda _: None)


@pytest.fixture(scope="module")
def serving(opened: ServedModels) -> Iterator[RunningServer]:
    serving = start_serving(opened, "127.0.0.1", 0, TOKEN)
    yield serving
    serving.close()


@pytest.fixture(scope="module")
def client(serving: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key=TOKEN, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def raw(serving: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serving.url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=30) as client:
        yield client


def directly(opened: ServedModels, model: str, *, n: int, sampling: Sampling, seed: int) -> list[str]:
    """The engine itself: another one over the same weights, with no server."""
    served = opened.policies.find(model)
    assert served is not None
    base = opened.policies.base
    engine = TorchEngine(base.policy, base.tokenizer, max_running_requests=8)
    slot = None
    if served.slot is not None:
        from orbit_runtime.serve.policies import open_policy
        from orbit_runtime.types import AdapterFiles

        slot = f"direct-{seed}"
        engine.load_adapter(slot, AdapterFiles(0, open_policy(served.place).files, served.digest))
    prompt = tuple(base.tokenizer.encode_chat(MESSAGES))
    requests = [Request(index, choice_key(seed, 0, index), prompt, sampling, slot) for index in range(n)]
    texts = {each.request_id: each.text for each in sample(engine, requests)}
    engine.close()
    return [texts[index] for index in range(n)]


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def test_the_client_lists_base_and_adapter(client: openai.OpenAI) -> None:
    assert sorted(model.id for model in client.models.list()) == sorted(MODELS)
    assert client.models.retrieve("policy").id == "policy"


@pytest.mark.parametrize("model", MODELS)
def test_a_chat_is_the_engines_own_answer_with_the_same_seed(
    client: openai.OpenAI, opened: ServedModels, model: str
) -> None:
    sampling = Sampling(max_new_tokens=12, temperature=0.9, top_p=0.95)
    expected = directly(opened, model, n=2, sampling=sampling, seed=7)
    options = {"model": model, "messages": MESSAGES, "seed": 7, "n": 2, "max_tokens": 12, "temperature": 0.9}
    answer = client.chat.completions.create(**options, top_p=0.95)
    assert [choice.message.content for choice in answer.choices] == expected
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    texts = {0: "", 1: ""}
    reasons = {}
    for chunk in client.chat.completions.create(**options, top_p=0.95, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert [texts[0], texts[1]] == expected
    assert reasons == {choice.index: choice.finish_reason for choice in answer.choices}


def test_base_and_adapter_give_other_logprobs_for_the_same_tokens(client: openai.OpenAI) -> None:
    found = {}
    for model in MODELS:
        answer = client.completions.create(
            model=model, prompt="12+34=", max_tokens=3, seed=1, logprobs=0, extra_body={"ignore_eos": True}
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert len(logprobs.token_logprobs) == 3
        found[model] = logprobs.token_logprobs
    assert found["tiny-adder"] != found["policy"]


def test_streamed_logprobs_are_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    options = {"model": "policy", "messages": MESSAGES, "seed": 3, "max_tokens": 8, "logprobs": True}
    whole = client.chat.completions.create(**options).choices[0].logprobs
    assert whole is not None
    assert whole.content
    pieces = [
        token.logprob
        for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content or ()
    ]
    assert pieces == [token.logprob for token in whole.content]


def test_alternatives_are_those_of_the_engine_and_hold_the_sampled_token(client: openai.OpenAI) -> None:
    """Their numbers are compared with transformers' in `test_alternatives.py`."""
    options = {"model": "policy", "messages": MESSAGES, "temperature": 0, "max_tokens": 5, "logprobs": True}
    whole = client.chat.completions.create(**options, top_logprobs=3)
    content = whole.choices[0].logprobs.content
    for token in content:
        assert len(token.top_logprobs) == 3
        assert (token.top_logprobs[0].token, token.top_logprobs[0].logprob) == (token.token, token.logprob)
        assert sorted((each.logprob for each in token.top_logprobs), reverse=True) == [
            each.logprob for each in token.top_logprobs
        ]
    streamed = [
        token
        for chunk in client.chat.completions.create(**options, top_logprobs=3, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content or ()
    ]
    assert streamed == content
    plain = client.completions.create(model="policy", prompt="1+1=", temperature=0, max_tokens=3, logprobs=2)
    told = plain.choices[0].logprobs
    for token, logprob, others in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        assert (others[token], len(others)) == (logprob, 2)


def test_several_prompts_and_a_stop(client: openai.OpenAI) -> None:
    options = {"model": "tiny-adder", "prompt": ["1+1=", "2+2="], "seed": 5, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**options, max_tokens=10)
    assert [choice.index for choice in whole.choices] == [0, 1]
    text = whole.choices[0].text
    stop = text[2:4]
    cut = client.completions.create(**options, max_tokens=10, stop=stop)
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    streamed = client.completions.create(**options, max_tokens=10, stop=stop, stream=True)
    pieces = "".join(choice.text for chunk in streamed for choice in chunk.choices if choice.index == 0)
    assert pieces == cut.choices[0].text


def test_several_stops_choices_and_the_usage_of_a_stream(client: openai.OpenAI) -> None:
    options = {"model": "policy", "messages": MESSAGES, "n": 2, "seed": 4, "stop": ["7", "8"], "temperature": 1.0}
    whole = client.chat.completions.create(**options, max_completion_tokens=6)
    texts = {0: "", 1: ""}
    chunks = [
        *client.chat.completions.create(
            **options, max_completion_tokens=6, stream=True, stream_options={"include_usage": True}
        )
    ]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [texts[0], texts[1]] == [choice.message.content for choice in whole.choices]
    assert not {"7", "8"} & set(texts[0] + texts[1])
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize("streams", [False, True])
def test_every_answer_carries_the_run_version_and_digest_of_its_policy(raw: httpx.Client, streams: bool) -> None:
    for model, run in (("policy", "small"), ("tiny-adder", None)):
        listed = raw.get(f"/v1/models/{model}").json()
        body = {"model": model, "messages": MESSAGES, "max_tokens": 1, "stream": streams}
        told = json.loads(raw.post("/v1/chat/completions", json=body).headers["orbit-policy"])
        assert told == {name: listed[name] for name in ("run", "policy_version", "digest", "evaluation")}
        assert (told["run"], told["policy_version"] is None) == (run, run is None)


@pytest.mark.parametrize("key", ["wrong", "a-token-of-test", "ü"])
def test_a_wrong_token_is_refused(serving: RunningServer, key: str) -> None:
    headers = {b"authorization": b"Bearer " + key.encode()}
    answer = httpx.get(f"{serving.url}/v1/models", headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{serving.url}/metrics").status_code == 401
    assert httpx.get(f"{serving.url}/health").status_code == 200


def test_the_client_raises_its_own_errors(serving: RunningServer, client: openai.OpenAI) -> None:
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.NotFoundError, match="there are: tiny-adder, policy"):
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="more than"):
        client.chat.completions.create(model="policy", messages=MESSAGES, max_tokens=100_000)


BAD = {
    "negative n": (b'{"model": "policy", "prompt": "1", "n": -1}', "n"),
    "negative tokens": (b'{"model": "policy", "prompt": "1", "max_tokens": -1}', "max_tokens"),
    "negative temperature": (b'{"model": "policy", "prompt": "1", "temperature": -0.5}', "temperature"),
    "negative token": (b'{"model": "policy", "prompt": [-1]}', "prompt"),
    "token of no vocabulary": (b'{"model": "policy", "prompt": [99999]}', "prompt"),
    "empty prompt": (b'{"model": "policy", "prompt": []}', "n"),
    "not a number": (b'{"model": "policy", "prompt": "1", "top_p": NaN}', None),
    "infinite": (b'{"model": "policy", "prompt": "1", "temperature": 1e999}', "temperature"),
    "invalid UTF-8": (b'{"model": "policy", "prompt": "\xff"}', None),
    "not JSON": (b"{", None),
    "no object": (b"[]", None),
    "deep": (b"[" * 200_000, None),
    "unknown field": (b'{"model": "policy", "prompt": "1", "beams": 4}', "beams"),
    "not computed": (b'{"model": "policy", "prompt": "1", "presence_penalty": 1}', "presence_penalty"),
    "half a character": (b'{"model": "policy", "prompt": "\\ud800"}', None),
    "half a character as model": (b'{"model": "\\uD800", "prompt": "1"}', None),
    "temperature beyond fp32": (b'{"model": "policy", "prompt": "1", "temperature": 1e-40}', "temperature"),
    "one token twice": (b'{"model": "policy", "prompt": "1", "logit_bias": {"1": 1, "01": 2}}', "logit_bias"),
    "bias of no token": (b'{"model": "policy", "prompt": "1", "logit_bias": {"99999": 1}}', "logit_bias"),
    "stop at no token": (b'{"model": "policy", "prompt": "1", "stop_token_ids": [99999]}', "stop_token_ids"),
    "many choices": (b'{"model": "policy", "prompt": "1", "n": 100000}', "n"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_body_is_400_and_names_the_field(raw: httpx.Client, name: str) -> None:
    body, param = BAD[name]
    answer = raw.post("/v1/completions", content=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_logprobs", 3),
        ("top_logprobs", 21),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("frequency_penalty", 0.5),
        ("modalities", ["audio"]),
        ("chat_template_kwargs", {"enable_thinkng": False}),
        ("reasoning_effort", "low"),
        ("max_completion_tokens", -1),
    ],
)
def test_what_a_chat_is_not_computed_with_is_refused_by_name(raw: httpx.Client, field: str, value: object) -> None:
    answer = raw.post("/v1/chat/completions", json={"model": "policy", "messages": MESSAGES, field: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", field)


def test_a_body_of_ten_megabytes_is_refused_announced_or_not(raw: httpx.Client) -> None:
    answer = raw.post("/v1/completions", content=b"x" * 10_000_000)
    assert answer.status_code == 413
    answer = raw.post("/v1/completions", content=iter([b"x" * 1_000_000] * 10))
    assert answer.status_code == 413
    assert raw.get("/health").status_code == 200


def test_a_tool_that_is_no_function_is_400(raw: httpx.Client) -> None:
    body = {"model": "policy", "messages": MESSAGES, "tools": [{"type": "function", "function": "add"}]}
    answer = raw.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


def test_paths_and_methods_that_are_not_there_are_errors_of_the_same_shape(raw: httpx.Client) -> None:
    for answer, status in ((raw.get("/v1/nothing"), 404), (raw.get("/v1/completions"), 405)):
        assert answer.status_code == status
        assert "/v1/completions" in answer.json()["error"]["message"]


def test_more_than_may_be_under_way_is_429(client: openai.OpenAI) -> None:
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="policy", prompt="1", n=65)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(serving: RunningServer, opened: ServedModels, stream: bool) -> None:
    body = json.dumps(
        {"model": "policy", "prompt": "1+1=", "max_tokens": 240, "n": 32, "ignore_eos": True, "stream": stream}
    ).encode()
    host, port = serving.url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    before = aborted(serving)
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: under_way(serving) == 32)
        if stream:
            connection.recv(1)
    until(lambda: under_way(serving) == 0)
    until(lambda: aborted(serving) > before)


def test_idle_connections_keep_nobody_from_being_answered(serving: RunningServer, client: openai.OpenAI) -> None:
    host, port = serving.url.removeprefix("http://").split(":")
    # As many as a process may have; the other ends are in the front's.
    allowed = min(1000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200)
    with ExitStack() as idle:
        for _ in range(allowed):
            idle.enter_context(socket.create_connection((host, int(port))))
        assert client.completions.create(model="policy", prompt="1+1=", max_tokens=2).choices


def metrics(serving: RunningServer) -> list[str]:
    return httpx.get(f"{serving.url}/metrics", headers={"authorization": f"Bearer {TOKEN}"}).text.splitlines()


def aborted(serving: RunningServer) -> float:
    lines = [line for line in metrics(serving) if 'reason="abort"' in line and "_total{" in line]
    return sum(float(line.split()[-1]) for line in lines)


def under_way(serving: RunningServer) -> float:
    (line,) = [each for each in metrics(serving) if each.startswith("orbit_serve_completions_under_way ")]
    return float(line.split()[-1])


def test_a_corrupted_adapter_is_refused_and_the_old_one_still_serves(
    raw: httpx.Client, client: openai.OpenAI, trained: Path
) -> None:
    options = {"model": "policy", "messages": MESSAGES, "seed": 11, "max_tokens": 8, "logprobs": True}

    def answered() -> list[float]:
        logprobs = client.chat.completions.create(**options).choices[0].logprobs
        assert logprobs is not None
        return [token.logprob for token in logprobs.content or ()]

    before = answered()
    digest = raw.get("/v1/models/policy").json()["digest"]
    broken = trained / "broken"
    shutil.copytree(trained / "adapters" / "policy-v1", broken)
    weights = broken / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 0x40
    weights.write_bytes(data)
    manifest = json.loads((trained / "adapters" / "policy-v1" / "manifest.json").read_text())
    # Its digests agree with its bytes, but it is not what the trainer measured.
    changed = trained / "changed"
    shutil.copytree(trained / "adapters" / "policy-v1", changed)
    manifest["facts"]["canary"]["logprobs"] = [each - 1.0 for each in manifest["facts"]["canary"]["logprobs"]]
    (changed / "manifest.json").write_text(json.dumps(manifest))
    for folder, words in ((broken, "changed"), (changed, "could not be proven live")):
        answer = raw.post("/update_weights", json={"adapter": str(folder)})
        assert answer.status_code == 422, answer.text
        assert words in answer.json()["error"]["message"]
        assert raw.get("/v1/models/policy").json()["digest"] == digest
    assert answered() == before


def test_weights_change_with_proof_and_go_back(
    raw: httpx.Client, client: openai.OpenAI, opened: ServedModels, trained: Path
) -> None:
    options = {"messages": MESSAGES, "seed": 2, "max_tokens": 6, "temperature": 0.8, "logprobs": True}

    def answered(model: str) -> list[float]:
        logprobs = client.chat.completions.create(model=model, **options).choices[0].logprobs
        assert logprobs is not None
        return [token.logprob for token in logprobs.content or ()]

    newest = answered("policy")
    answer = raw.post("/update_weights", json={"adapter": str(trained / "adapters" / "policy-v1")})
    assert answer.status_code == 200, answer.text
    assert answer.json()["policy_version"] == 1
    assert answer.json()["proof"]["verdict"] == "proven"
    assert answered("policy") != newest
    assert len(opened.engine.adapters()) == 1
    assert raw.post("/reload_weights").status_code == 200
    assert answered("policy") == answered("tiny-adder")
    # Without what Orbit wrote beside it: as any other library's.
    foreign = trained / "foreign"
    shutil.copytree(trained / "adapters" / "policy-v2", foreign)
    (foreign / "manifest.json").unlink()
    answer = raw.post("/update_weights", json={"adapter": str(foreign), "model": "policy"})
    assert answer.status_code == 200, answer.text
    assert answered("policy") == newest


def test_adapters_from_elsewhere_are_forbidden_and_the_base_has_no_other(
    raw: httpx.Client, trained: Path, tmp_path: Path
) -> None:
    for place in (str(tmp_path), f"{trained}/../elsewhere", "s3://bucket/adapter"):
        assert raw.post("/update_weights", json={"adapter": place}).status_code == 403
    answer = raw.post("/update_weights", json={"adapter": str(trained), "model": "tiny-adder"})
    assert answer.status_code == 400


@pytest.mark.parametrize("asked", [{"adapter": ""}, {"adapter": " ", "model": "policy"}, {"checkpoint": ""}])
def test_an_empty_address_changes_nothing(raw: httpx.Client, asked: dict[str, str]) -> None:
    before = raw.get("/v1/models").json()
    assert raw.post("/update_weights", json=asked).status_code == 422
    assert raw.get("/v1/models").json() == before


def test_the_command_serves_drains_and_ends_with_0(trained: Path) -> None:
    command = [sys.executable, "-m", "orbit_runtime", "serve", "--model", "builtin://tiny-adder"]
    command += ["--adapter", f"sums={trained}", "--listen", "127.0.0.1:0", "--json"]
    environment = {**os.environ, "ORBIT_SERVE_TOKEN": TOKEN}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = json.loads(_first_document(process))
    assert said["models"] == ["tiny-adder", "sums"]
    with openai.OpenAI(base_url=f"{said['url']}/v1", api_key=TOKEN, max_retries=0) as client:
        stream = client.completions.create(
            model="sums", prompt="1+1=", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        )
        pieces = iter(stream)
        next(pieces)
        process.send_signal(signal.SIGTERM)
        assert [choice.finish_reason for chunk in pieces for choice in chunk.choices][-1] == "length"
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert TOKEN not in errors


def test_the_process_that_speaks_http_maps_nothing_of_torch(serving: RunningServer, client: openai.OpenAI) -> None:
    """The real process, after it answered a chat, whose template its tokenizer's library rendered."""
    client.chat.completions.create(model="policy", messages=MESSAGES, max_tokens=4)
    mapped = Path(f"/proc/{serving.front_pid}/maps").read_text()
    assert "uvloop" in mapped, "these are its libraries"
    assert not re.search(r"/torch/|libtorch|/triton/|libcud", mapped)
    # The engine's own, where the same words are found.
    assert "libtorch" in Path("/proc/self/maps").read_text()


def test_a_front_that_dies_ends_the_server_with_an_error(trained: Path) -> None:
    serving = start_serving(
        open_models(ServeRequest(str(trained)), ServeLimits(), lambda _: None), "127.0.0.1", 0, None
    )
    serving.check()
    os.kill(serving.front_pid, signal.SIGKILL)

    def is_noticed() -> bool:
        try:
            serving.check()
        except EngineDiedError as error:
            return error.exit_code == 82
        return False

    until(is_noticed)
    serving.close()


def _first_document(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        try:
            json.loads(text)
        except ValueError:
            continue
        return text
    raise AssertionError(f"it ended: {process.communicate()[1]}")


@pytest.mark.parametrize(
    "place",
    ["run/\0", "~nobody-here/x", "file://~nobody-here/x", "x" * 300, "ab/" * 2000, "s3://bucket/\0"],
    ids=["NUL", "user", "user of a file", "part", "path", "NUL of a store"],
)
@pytest.mark.parametrize("field", ["adapter", "checkpoint"])
def test_an_address_at_which_nothing_can_be_is_422_at_once(raw: httpx.Client, field: str, place: str) -> None:
    before = raw.get("/v1/models").json()
    answer = raw.post("/update_weights", json={field: place}, timeout=10)
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, field), answer.text
    assert raw.get("/v1/models").json() == before
    assert raw.get("/health").status_code == 200


def test_a_link_to_itself_is_no_failure_of_the_engine(raw: httpx.Client, trained: Path) -> None:
    link = trained / "loop"
    link.symlink_to(link)
    assert raw.post("/update_weights", json={"adapter": str(link)}, timeout=10).status_code in (403, 422)
    link.unlink()


@pytest.mark.parametrize("name", ["../../x", "a/../b", "x\x1b[2J", "", "/a", "a//b", "x" * 65, "a/b/c/d/e", "ü\u202e"])
def test_a_new_name_is_one_that_can_be_shown(raw: httpx.Client, trained: Path, name: str) -> None:
    before = raw.get("/v1/models").json()
    asked = {"adapter": str(trained / "adapters" / "policy-v1"), "model": name or " "}
    answer = raw.post("/update_weights", json=asked)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model"), answer.text
    assert raw.get("/v1/models").json() == before


CALLS = [
    "abc", {"a": 1}, ["f"], [{"function": {"name": "f"}}], [{"function": {"name": "f", "arguments": "{"}}],
    [{"function": {"name": "f", "arguments": "[1]"}}], [{"function": {"name": "f", "arguments": [{}]}}],
    [{"function": {"name": "f", "arguments": 1}}], [{"function": {"name": ["f"], "arguments": "{}"}}],
]  # fmt: skip


@pytest.mark.parametrize("calls", CALLS, ids=json.dumps)
def test_calls_that_are_none_are_400(raw: httpx.Client, calls: object) -> None:
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "tool_calls": calls}]
    answer = raw.post("/v1/chat/completions", json={"model": "policy", "messages": messages, "max_tokens": 1})
    assert answer.status_code == 400, answer.text


def test_arguments_of_any_depth_are_no_bug_of_orbit(raw: httpx.Client) -> None:
    """Of a few depths, just below what the library reads, it cannot write them again."""
    for depth in (900, *range(1480, 1502)):
        arguments = '{"a":' * depth + "1" + "}" * depth
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "user", "content": "1"}, {"role": "assistant", "tool_calls": [call]}]
        answer = raw.post("/v1/chat/completions", json={"model": "policy", "messages": messages, "max_tokens": 1})
        assert answer.status_code == 400, (depth, answer.text)


def test_names_and_rights_are_bounded(trained: Path) -> None:
    """No more names than the limit, and only one of the two tokens changes them."""
    opened = open_models(ServeRequest(str(trained)), ServeLimits(models=3), lambda _: None)
    serving = start_serving(opened, "127.0.0.1", 0, TOKEN, "the-other")
    asked = {"adapter": str(trained / "adapters" / "policy-v1"), "model": "team/sums:v2"}
    try:
        with (
            httpx.Client(base_url=serving.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as client,
            httpx.Client(base_url=serving.url, headers={"Authorization": "Bearer the-other"}, timeout=60) as owner,
        ):
            sampled = {"model": "policy", "prompt": "1+1=", "max_tokens": 1}
            assert client.post("/v1/completions", json=sampled).status_code == 200
            for path in ("/update_weights", "/reload_weights"):
                assert client.post(path, json=asked).status_code == 403
                assert httpx.post(f"{serving.url}{path}", json=asked).status_code == 401
            assert owner.post("/v1/completions", json=sampled).status_code == 200
            assert owner.post("/update_weights", json=asked).status_code == 200
            # Even a name that stands for the base again is one.
            assert owner.post("/reload_weights", json={"model": "team/sums:v2"}).status_code == 200
            refused = owner.post("/update_weights", json={**asked, "model": "another"})
            assert refused.status_code == 422
            assert "at most 3" in refused.json()["error"]["message"]
            assert owner.post("/update_weights", json=asked).status_code == 200
            assert len(owner.get("/v1/models").json()["data"]) == 3
    finally:
        serving.close()
        opened.close()


def test_weights_need_their_token_where_sampling_needs_none(trained: Path) -> None:
    opened = open_models(ServeRequest(model="builtin://tiny-adder"), ServeLimits(), lambda _: None)
    serving = start_serving(opened, "127.0.0.1", 0, None, "the-other")
    try:
        assert httpx.get(f"{serving.url}/v1/models").status_code == 200
        assert httpx.post(f"{serving.url}/reload_weights").status_code == 401
        told = {"Authorization": "Bearer the-other"}
        assert httpx.post(f"{serving.url}/reload_weights", headers=told).status_code == 200
    finally:
        serving.close()
        opened.close()


def test_a_run_is_served_with_longer_sequences_than_it_trained_on(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    file = tmp_path / "run" / "run.json"
    content = json.loads(file.read_text())
    content["resolved"]["spec"]["model"]["maxSequenceLength"] = 64
    file.write_text(json.dumps(content))
    opened = open_models(ServeRequest(f"{tmp_path}/run@newest"), ServeLimits(sequence=512), lambda _: None)
    assert opened.limits.sequence == 512
    serving = start_serving(opened, "127.0.0.1", 0, None)
    body = {"model": "policy", "prompt": "12+34=" * 30, "max_tokens": 2}
    answer = httpx.post(f"{serving.url}/v1/completions", json=body, timeout=60)
    serving.close()
    opened.close()
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] > 64
