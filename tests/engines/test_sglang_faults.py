"""What goes wrong around a real SGLang server, and that nothing is lost or believed."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from orbit_runtime.adapters.state import MODEL_FILE, expected_applied_digest
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.errors import EngineDiedError, GateError
from orbit_runtime.policy import Policy
from orbit_runtime.rollout.sglang import SGLangEngine
from orbit_runtime.rollout.sglang_server import SGLangServer
from orbit_runtime.types import AdapterFiles, Sampling
from orbit_runtime.workers.server_process import ServerProcess
from tests.integration.engine_inputs import by_id, random_adapter, requests_for

Adder = tuple[Policy, ChatTokenizer]
NewName = Callable[[], str]


def server_of(engine: SGLangEngine) -> SGLangServer:
    server = engine._server
    assert isinstance(server, SGLangServer)
    return server


def post(engine: SGLangEngine, path: str, body: dict) -> dict:
    answer = httpx.post(f"{server_of(engine).url}{path}", json=body, timeout=60, trust_env=False)
    return dict(answer.json())


def canary(tokenizer: ChatTokenizer) -> list[int]:
    return [*tokenizer.encode_chat([{"role": "user", "content": "12+34="}]), 9, 12]


def test_other_bytes_under_the_same_name_show_in_both_digests(
    sglang: SGLangEngine, adder: Adder, new_name: NewName, tmp_path: Path
) -> None:
    policy, tokenizer = adder
    name, published, other = new_name(), random_adapter(policy, 1), random_adapter(policy, 2)
    sglang.load_adapter(name, published)
    post(sglang, "/unload_lora_adapter", {"lora_name": name})
    for file, content in other.files.items():
        (tmp_path / file).write_bytes(content)
    assert post(sglang, "/load_lora_adapter", {"lora_name": name, "lora_path": str(tmp_path)})["success"]
    (scored,) = sglang.score(canary(tokenizer), [name])
    assert sglang.adapter_digest(name) == other.digest != published.digest
    assert scored.applied_digest == expected_applied_digest(other.files)
    assert scored.applied_digest != expected_applied_digest(published.files)
    sglang.unload_adapter(name)


def test_a_changed_scaling_shows(sglang: SGLangEngine, adder: Adder, new_name: NewName, tmp_path: Path) -> None:
    policy, tokenizer = adder
    name, published = new_name(), random_adapter(policy, 1)
    doubled = json.loads(published.files["adapter_config.json"])
    doubled["lora_alpha"] *= 2
    files = {**published.files, "adapter_config.json": json.dumps(doubled).encode()}
    sglang.load_adapter(name, AdapterFiles(1, files, published.digest))
    (scored,) = sglang.score(canary(tokenizer), [name])
    assert sglang.adapter_digest(name) != published.digest
    assert scored.applied_digest != expected_applied_digest(published.files)
    sglang.unload_adapter(name)


def test_an_adapter_that_the_server_dropped_comes_back_as_the_same_bytes_and_a_retired_one_never(
    sglang: SGLangEngine, adder: Adder, new_name: NewName
) -> None:
    """SGLang loads a name that it once knew again, from its files, as soon as a request asks for it."""
    policy, tokenizer = adder
    name, adapter = new_name(), random_adapter(policy, 1)
    sglang.load_adapter(name, adapter)
    post(sglang, "/unload_lora_adapter", {"lora_name": name})
    (scored,) = sglang.score(canary(tokenizer), [name])
    assert scored.applied_digest == expected_applied_digest(adapter.files)
    assert sglang.adapter_digest(name) == adapter.digest
    sglang.unload_adapter(name)
    body = {"input_ids": canary(tokenizer), "lora_path": name, "sampling_params": {"max_new_tokens": 1}}
    answer = httpx.post(f"{server_of(sglang).url}/generate", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("fault", ["rank", "unknown target", "not finite file"])
def test_an_adapter_that_does_not_fit_is_refused_by_name(
    sglang: SGLangEngine, adder: Adder, new_name: NewName, fault: str
) -> None:
    policy, _ = adder
    adapter = random_adapter(policy, 1)
    config = json.loads(adapter.files["adapter_config.json"])
    files = dict(adapter.files)
    if fault == "rank":
        config["r"] = 64
    elif fault == "unknown target":
        config["target_modules"] = ["no_such_proj"]
    else:
        files[MODEL_FILE] = files[MODEL_FILE][:100]
    files["adapter_config.json"] = json.dumps(config).encode()
    name = new_name()
    with pytest.raises(GateError, match=name):
        sglang.load_adapter(name, AdapterFiles(1, files, "sha256:x"))
    assert name not in sglang.adapters()


def test_a_server_killed_in_mid_generation_loses_and_doubles_nothing(
    sglang: SGLangEngine, adder: Adder, new_name: NewName
) -> None:
    policy, tokenizer = adder
    name, adapter = new_name(), random_adapter(policy, 7)
    sglang.load_adapter(name, adapter)
    before = sglang.restarts
    requests = requests_for(
        tokenizer, [f"{a}+{a}=" for a in range(10, 60)], 8, sampling=Sampling(max_new_tokens=24), adapter=name
    )
    killed = threading.Timer(0.5, lambda: os.killpg(server_of(sglang).pid, signal.SIGKILL))
    killed.start()
    completions = list(sglang.generate(requests))
    killed.join()
    assert sglang.restarts == before + 1
    assert len(completions) == len(by_id(completions)) == len(requests)
    assert {version for completion in completions for version in completion.versions_T} == {7}
    (scored,) = sglang.score(canary(tokenizer), [name])
    assert scored.applied_digest == expected_applied_digest(adapter.files)
    assert sglang.adapter_digest(name) == adapter.digest
    sglang.unload_adapter(name)


def test_a_server_that_cannot_start_is_told_with_its_log(tmp_path: Path) -> None:
    process = ServerProcess("SGLang", ["sh", "-c", "echo no such model >&2; exit 3"],
                            environment=os.environ, log=tmp_path / "log")  # fmt: skip
    with pytest.raises(EngineDiedError, match="ended with 3") as caught:
        process.wait_until(lambda: False, seconds=10)
    assert "no such model" in str(caught.value.fix)
    assert caught.value.exit_code == 82
    hung = ServerProcess("SGLang", ["sleep", "60"], environment=os.environ, log=tmp_path / "log2")
    with pytest.raises(EngineDiedError, match="did not answer within 1 s"):
        hung.wait_until(lambda: False, seconds=1)
    started = time.monotonic()
    hung.stop()
    assert hung.exit_status() is not None
    assert time.monotonic() - started < 10
