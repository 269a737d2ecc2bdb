"""`docs/guides/serving.md` as a reader follows it, an evaluation of what is served, and the limits on time."""

from __future__ import annotations

import json
import re
import resource
import shlex
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fakes.guide import ROOT, commands, run_in_process

from orbit_runtime.evaluation.journal import read_samples
from orbit_runtime.serve.open import ServeRequest, open_models
from orbit_runtime.serve.requests import ServeLimits
from orbit_runtime.serve.server import RunningServer, start_serving
from orbit_runtime.storage import open_store

GUIDE = (ROOT / "docs/guides/serving.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"
MOST = 240
"""Tokens: a completion that takes a while."""


def served(asked: ServeRequest, limits: ServeLimits) -> RunningServer:
    return start_serving(open_models(asked, limits, lambda _: None), "127.0.0.1", 0, None)


@pytest.fixture(scope="module")
def serving(trained: Path) -> Iterator[RunningServer]:
    """What the guide's first command serves. One completion at a time: many take as long as there are of them."""
    serving = served(ServeRequest(str(trained)), ServeLimits(running=1, drain_seconds=0.05))
    yield serving
    serving.close()


FILES = 256
"""Open files that a process begins with."""


@pytest.fixture(scope="module")
def hurried() -> Iterator[RunningServer]:
    opened = open_models(
        ServeRequest(model="builtin://tiny-adder"), ServeLimits(seconds=1e-3, read_seconds=0.2), lambda _: None
    )
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, before[1]))
    try:
        serving = start_serving(opened, "127.0.0.1", 0, None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    yield serving
    serving.close()


def test_the_guides_client_and_its_change_of_weights(serving: RunningServer, trained: Path) -> None:
    assert re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL)[0] == "orbit serve runs/quickstart\n"
    (client,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    said: list[str] = []
    exec(client.replace(ADDRESS, serving.url), {"print": said.append})
    (answer,) = said
    assert 1 <= len(answer) <= 4
    change, _ = commands(GUIDE, "Other weights while it serves")
    program, *words = shlex.split(change.replace(ADDRESS, serving.url))
    assert (program, words[::2][:2]) == ("curl", ["-H", "--json"])
    body = json.loads(words[3].replace("runs/quickstart", str(trained)).replace("policy-v20", "policy-v1"))
    for version in (1, 2):
        body["adapter"] = str(trained / "adapters" / f"policy-v{version}")
        found = httpx.post(words[-1], json=body, timeout=60)
        assert (found.status_code, found.json()["policy_version"]) == (200, version), found.text


def test_an_evaluation_of_what_is_served_has_the_answers_of_the_adapter_itself(
    serving: RunningServer, trained: Path, tmp_path: Path
) -> None:
    size = "--set evaluation.limit=6 --set evaluation.temperature=0 --set evaluation.samples=1"
    over = f"--base-url {serving.url}/v1 --model policy"
    run_in_process(f"orbit eval {trained} {over} --out {tmp_path}/served {size} --json", tmp_path)
    run_in_process(f"orbit eval {trained} --steps 2 --no-eval-base --out {tmp_path}/here {size} --json", tmp_path)
    found = [
        {(each.prompt_id, each.sample_index): (each.turns, each.reward) for each in read_samples(open_store(place))}
        for place in (f"{tmp_path}/served", f"{tmp_path}/here")
    ]
    assert len(found[0]) == 6
    assert found[0] == found[1]


def test_a_whole_model_is_no_adapter_and_says_where_it_belongs(serving: RunningServer, trained: Path) -> None:
    whole = trained / "models" / "policy-v1"
    whole.mkdir(parents=True)
    (whole / "config.json").write_text("{}")
    found = httpx.post(f"{serving.url}/update_weights", json={"adapter": str(whole)})
    assert found.status_code == 422
    assert "as `checkpoint`" in found.json()["error"]["message"]


def test_the_guides_whole_model_takes_the_bases_place_once_the_adapter_is_put_back(
    serving: RunningServer, trained: Path, tmp_path: Path
) -> None:
    _, merged = commands(GUIDE, "Other weights while it serves")
    merge, *sent = merged.replace(ADDRESS, serving.url).replace("runs/quickstart", str(trained)).splitlines()
    run_in_process(merge.replace("policy-v20", "policy-v2"), tmp_path)
    before = httpx.get(f"{serving.url}/v1/models/tiny-adder").json()
    assert [shlex.split(each)[-1] for each in sent] == [
        f"{serving.url}/{route}" for route in ("reload_weights", "update_weights", "reload_weights")
    ]
    said = []
    for each in sent:
        words = shlex.split(each)
        body = words[words.index("--json") + 1] if "--json" in words else None
        assert body or "-X" in words
        said.append(httpx.post(words[-1], content=body, timeout=60))
    assert [each.status_code for each in said] == [200, 200, 200], [each.text for each in said]
    assert said[1].json()["proof"]["verdict"] == "proven"
    assert said[1].json()["digest"] != before["digest"] == said[2].json()["digest"]
    adapter = {"adapter": str(trained / "adapters/policy-v2"), "model": "policy"}
    assert httpx.post(f"{serving.url}/update_weights", json=adapter, timeout=60).status_code == 200


def test_what_takes_too_long_ends_as_it_is(hurried: RunningServer) -> None:
    body = {"model": "tiny-adder", "prompt": "1+1=", "n": 16, "max_tokens": MOST, "ignore_eos": True}
    found = httpx.post(f"{hurried.url}/v1/completions", json=body, timeout=60).json()
    assert {each["finish_reason"] for each in found["choices"]} == {"length"}
    assert found["usage"]["completion_tokens"] < 16 * MOST


def test_a_body_that_does_not_arrive_is_408(hurried: RunningServer) -> None:
    host, port = hurried.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408")
    assert httpx.get(f"{hurried.url}/health").status_code == 200


def test_connections_are_not_limited_by_the_files_that_a_shell_allows(hurried: RunningServer) -> None:
    host, port = hurried.url.removeprefix("http://").split(":")
    with ExitStack() as idle:
        for _ in range(FILES + 40):
            idle.enter_context(socket.create_connection((host, int(port))))
        assert httpx.get(f"{hurried.url}/health", timeout=30).status_code == 200


def test_a_stream_that_outlasts_the_drain_is_aborted_and_says_so(serving: RunningServer) -> None:
    """The last test of this server: 64 completions, one after the other, of which a fraction is done in 0.05 s."""
    options: dict[str, Any] = {"model": "policy", "prompt": "1+1=", "n": 64, "max_tokens": MOST, "stream": True}
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        pieces = iter(client.completions.create(**options, extra_body={"ignore_eos": True}))
        next(pieces)
        closing = threading.Thread(target=serving.close)
        closing.start()
        reasons = [choice.finish_reason for chunk in pieces for choice in chunk.choices if choice.finish_reason]
        closing.join()
    assert len(reasons) == 64
    assert "abort" in reasons
