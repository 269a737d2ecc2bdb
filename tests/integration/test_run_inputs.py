"""Whole runs that read model, prompts and rewards from elsewhere. The hub is a fake, the runs are real."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.hub_server import Fault, HubServer

from orbit_runtime.cli.main import run_command
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.data.records import decompress_rollouts
from orbit_runtime.evaluation.journal import read_samples
from orbit_runtime.serve.open import ServeRequest, open_models
from orbit_runtime.serve.requests import ServeLimits
from orbit_runtime.serve.server import start_serving
from orbit_runtime.storage import open_store
from tests.integration.killing import small_manifest
from tests.integration.run_launcher import RunLauncher

ROOT = Path(__file__).parents[2]
TINY = ROOT / "orbit_runtime/model_info/builtin/tiny-adder/int4"
MODEL = {path.name: path.read_bytes() for path in TINY.iterdir() if path.is_file()}
PROMPTS = (ROOT / "orbit_runtime/data/builtin/two-digit-addition.jsonl").read_bytes()
REWARD = "def score(completion, prompt, fields):\n    return float(completion == fields['answer'])\n"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.add("example/tiny-adder", MODEL)
        server.add("example/sums", {"train.jsonl": PROMPTS}, kind="datasets")
        yield server


@pytest.fixture
def environment(hub: HubServer, tmp_path: Path) -> dict[str, str]:
    return {**hub.environment(), "ORBIT_CACHE": str(tmp_path / "cache")}


def manifest(code: Path, *, steps: int) -> dict[str, Any]:
    made = small_manifest(steps=steps)
    made["spec"]["model"] = {"uri": "hf://example/tiny-adder"}
    made["spec"]["data"] = {"prompts": [{"uri": "hf://datasets/example/sums/train.jsonl"}]}
    rewards = [{"name": "correct", "entrypoint": "orbit_test_rewards:score"}]
    made["spec"]["environment"] = {"code": {"uri": str(code)}, "rewards": rewards}
    # A schedule that does not depend on the number of steps, so that a run may be made longer.
    made["spec"]["training"]["schedule"] = {"type": "Constant"}
    return made


def test_a_run_keeps_to_what_it_read_first(
    hub: HubServer, launcher: RunLauncher, environment: dict[str, str], tmp_path: Path
) -> None:
    code, moved, out = tmp_path / "code", tmp_path / "moved", tmp_path / "run"
    code.mkdir()
    (code / "orbit_test_rewards.py").write_text(REWARD)
    assert launcher.run(manifest(code, steps=1), str(out), environment) == 0
    told = json.loads((out / "run.json").read_text())
    model = told["inputs"]["spec.model.uri"]
    assert model["revision"] == hub.repositories["models", "example/tiny-adder"].head
    config = f"sha256:{hashlib.sha256(MODEL['config.json']).hexdigest()}"
    assert told["identity"]["content.model.config.json"] == config
    assert told["identity"]["content.environment.code"].startswith("sha256:")
    adapter = json.loads((out / "adapters/policy-v1/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "example/tiny-adder"

    hub.add("example/tiny-adder", {**MODEL, "config.json": b"{}"})
    hub.requests.clear()
    code.rename(moved)
    assert launcher.run(manifest(moved, steps=2), str(out), environment) == 0
    assert not [request for request in hub.requests if "tiny-adder" in request.path]
    (moved / "orbit_test_rewards.py").write_text(REWARD + "# another\n")
    assert launcher.run(manifest(moved, steps=3), str(out), environment) == 73
    accepted = manifest(moved, steps=3)
    accepted["spec"]["checkpoint"]["acceptCode"] = True
    assert launcher.run(accepted, str(out), environment) == 0
    # Once accepted it need not be again, and checkpoints are still those of the same run.
    assert launcher.run(manifest(moved, steps=4), str(out), environment) == 0
    assert json.loads((out / "run.json").read_text())["identity"] == told["identity"]
    assert sorted(each.name for each in (out / "code").iterdir()) == ["000001.json", "000004.json"]


def test_sigterm_during_a_download_ends_with_75_and_the_next_start_goes_on(
    hub: HubServer, launcher: RunLauncher, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "orbit_test_rewards.py").write_text(REWARD)
    digest, released = hashlib.sha256(MODEL["model.safetensors"]).hexdigest(), threading.Event()
    hub.faults = [Fault(digest, hold=released)]
    made = manifest(tmp_path, steps=1)
    del made["spec"]["environment"]["code"]
    made["spec"]["environment"]["rewards"] = [{"name": "correct", "type": "ExactMatch"}]
    pid = launcher.start(made, str(tmp_path / "run"), environment)
    until = time.monotonic() + 60
    while not hub.asked_for(digest) and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(pid, signal.SIGTERM)
    time.sleep(0.5)
    released.set()
    assert launcher.wait() == 75
    assert launcher.run(made, str(tmp_path / "run"), environment) == 0


def test_a_mistake_in_an_address_has_its_exit_code(
    launcher: RunLauncher, environment: dict[str, str], tmp_path: Path
) -> None:
    made = small_manifest(steps=1)
    made["spec"]["model"] = {"uri": "hf://example/tiny-adder@none"}
    assert launcher.run(made, str(tmp_path / "a"), environment) == 66
    made["spec"]["data"] = {"prompts": [{"uri": "hf://datasets/example/sums/none.jsonl"}]}
    assert launcher.run(made, str(tmp_path / "b"), environment) == 65
    made["spec"]["environment"]["code"] = {"uri": str(tmp_path / "none")}
    made["spec"]["data"] = {"prompts": [{"uri": "builtin://two-digit-addition"}]}
    assert launcher.run(made, str(tmp_path / "c"), environment) == 64


def test_the_date_in_a_template_is_that_of_the_first_start_after_a_resume_too(
    launcher: RunLauncher, tmp_path: Path
) -> None:
    model, out = shutil.copytree(TINY, tmp_path / "model"), tmp_path / "run"
    template = model / "chat_template.jinja"
    template.write_text("{{ strftime_now('%H%M%S') }}" + template.read_text())
    made = small_manifest(steps=1)
    made["spec"]["model"] = {"uri": str(model)}
    made["spec"]["training"]["schedule"] = {"type": "Constant"}
    for steps in (1, 2):
        made["spec"]["training"]["steps"] = steps
        assert launcher.run(made, str(out)) == 0
    started = time.strftime("%H%M%S", time.gmtime(json.loads((out / "run.json").read_text())["started"]))
    tokenizer = ChatTokenizer(model)
    files = sorted((out / "rollouts").glob("*.zst"))
    prompts = [tokenizer.decode(decompress_rollouts(file.read_bytes())[0].token_ids_T) for file in files]
    assert [prompt[:6] for prompt in prompts] == [started, started]


def test_a_served_or_evaluated_run_has_the_date_of_its_first_start(launcher: RunLauncher, tmp_path: Path) -> None:
    model, out = shutil.copytree(TINY, tmp_path / "model"), tmp_path / "run"
    template = model / "chat_template.jinja"
    template.write_text("{{ '777' if strftime_now('%Y') == '1970' else '' }}" + template.read_text())
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "12+34=", "answer": "46"}\n')
    made = small_manifest(steps=1)
    made["spec"]["model"] = {"uri": str(model)}
    made["spec"]["data"] = {"prompts": [{"uri": str(tmp_path / "prompts.jsonl")}]}
    made["spec"]["training"] |= {"promptsPerStep": 1, "miniBatchPrompts": 1}
    assert launcher.run(made, str(out)) == 0
    kept = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps(kept | {"started": 0.0}))
    asked = [{"role": "user", "content": "12+34="}]
    long, short = (len(ChatTokenizer(model, started=each).encode_chat(asked)) for each in (0.0, None))
    assert long == short + 3
    (tmp_path / "run.json").write_text(json.dumps(made))
    asked_for = {"a": [str(out)], "b": [str(out), "--adapter", f"{out}@newest"]}
    asked_for["c"] = [str(tmp_path / "run.json"), "--adapter", str(out)]
    for name, arguments in asked_for.items():
        assert run_command(["eval", *arguments, "--out", str(tmp_path / name)]) == 0
        assert {each.usage.prompt_tokens for each in read_samples(open_store(str(tmp_path / name)))} == {long}, name
    serving = start_serving(open_models(ServeRequest(str(out)), ServeLimits(), print), "127.0.0.1", 0, None)
    try:
        body = {"model": "policy", "messages": asked, "max_tokens": 1}
        answer = httpx.post(f"{serving.url}/v1/chat/completions", json=body, timeout=60).json()
        body["tools"] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
        refused = httpx.post(f"{serving.url}/v1/chat/completions", json=body, timeout=60)
    finally:
        serving.close()
    assert answer["usage"]["prompt_tokens"] == long
    assert refused.status_code == 400
    assert "the chat template leaves out the tools that may be called" in refused.json()["error"]["message"]
