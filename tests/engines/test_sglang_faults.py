"""What goes wrong around a real SGLang server, and that nothing is lost or believed."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load, save

from orbit_runtime.adapters.files import CONFIG_FILE, MODEL_FILE, ROTATIONS_FILE, expected_applied_digest
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.errors import EngineDiedError, GateError
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.parity.liveness import Limits, prove
from orbit_runtime.policy import Policy
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.rollout.requests import sample
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.types import AdapterFiles, Engine, Sampling, Scored
from orbit_runtime.workers.servers.process import ServerProcess
from tests.engines.servers import post_to, server_of
from tests.integration.engine_inputs import by_id, random_adapter, requests_for

Adder = tuple[Policy, ChatTokenizer]
NewName = Callable[[], str]
RunInside = Callable[[ServedEngine, str], None]


@pytest.fixture(params=["SGLang", "SGLang-OFT"])
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sglang(engine: Engine) -> ServedEngine:
    assert isinstance(engine, ServedEngine)
    return engine


def post(engine: ServedEngine, path: str, body: dict) -> dict:
    return dict(post_to(engine, path, body).json())


def canary(tokenizer: ChatTokenizer) -> list[int]:
    return [*tokenizer.encode_chat([{"role": "user", "content": "12+34="}]), 9, 12]


def test_other_bytes_under_the_same_name_show_in_both_digests(
    sglang: ServedEngine, adder: Adder, new_name: NewName, tmp_path: Path
) -> None:
    policy, tokenizer = adder
    name, published, other = new_name(), random_adapter(policy, 1), random_adapter(policy, 2)
    sglang.load_adapter(name, published)
    post(sglang, "/unload_lora_adapter", {"lora_name": name})
    for file, content in other.files.items():
        (tmp_path / file).write_bytes(content)
    assert post(sglang, "/load_lora_adapter", {"lora_name": name, "lora_path": str(tmp_path)})["success"]
    (scored,) = sglang.copies()[0].score(canary(tokenizer), [name])
    assert sglang.copies()[0].adapter_digest(name) == other.digest != published.digest
    assert scored.applied_digest == expected_applied_digest(other.files)
    assert scored.applied_digest != expected_applied_digest(published.files)
    assert str(tmp_path) in sglang.copies()[0].explain_slot(name, published)
    sglang.unload_adapter(name)


@pytest.mark.parametrize("case", ["SGLang"], indirect=True)
def test_a_changed_scaling_shows(sglang: ServedEngine, adder: Adder, new_name: NewName, tmp_path: Path) -> None:
    policy, tokenizer = adder
    name, published = new_name(), random_adapter(policy, 1)
    doubled = json.loads(published.files["adapter_config.json"])
    doubled["lora_alpha"] *= 2
    files = {**published.files, "adapter_config.json": json.dumps(doubled).encode()}
    sglang.load_adapter(name, AdapterFiles(1, files, published.digest))
    (scored,) = sglang.copies()[0].score(canary(tokenizer), [name])
    assert sglang.copies()[0].adapter_digest(name) != published.digest
    assert scored.applied_digest != expected_applied_digest(published.files)
    assert "lora_alpha is 16, published was 8" in sglang.copies()[0].explain_slot(name, published)
    sglang.unload_adapter(name)


def test_an_adapter_that_the_server_dropped_comes_back_as_the_same_bytes_and_a_retired_one_never(
    sglang: ServedEngine, adder: Adder, new_name: NewName
) -> None:
    """SGLang loads a name that it once knew again, from its files, as soon as a request asks for it."""
    policy, tokenizer = adder
    name, adapter = new_name(), random_adapter(policy, 1)
    sglang.load_adapter(name, adapter)
    post(sglang, "/unload_lora_adapter", {"lora_name": name})
    (scored,) = sglang.copies()[0].score(canary(tokenizer), [name])
    assert scored.applied_digest == expected_applied_digest(adapter.files)
    assert sglang.copies()[0].adapter_digest(name) == adapter.digest
    sglang.unload_adapter(name)
    body = {"input_ids": canary(tokenizer), "lora_path": name, "sampling_params": {"max_new_tokens": 1}}
    answer = post_to(sglang, "/generate", body)
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize(
    ("case", "fault", "says"),
    [
        ("SGLang", "rank", "rank 64"),
        ("SGLang", "unknown target", "target modules"),
        ("SGLang", "cut file", ""),
        ("SGLang", "OFT", ""),
        ("SGLang-OFT", "block size", "oft_block_size is 8, this server was started for 16"),
        ("SGLang-OFT", "unknown target", "target modules"),
        ("SGLang-OFT", "cut file", MODEL_FILE),
        ("SGLang-OFT", "layer missing", "k_proj.oft_R is missing"),
        ("SGLang-OFT", "q and k differ", "k_proj.oft_R differs from .*q_proj.oft_R"),
        ("SGLang-OFT", "not finite", "is not finite"),
    ],
    indirect=["case"],
)
def test_an_adapter_that_does_not_fit_is_refused_by_name(
    sglang: ServedEngine, oft_adder: Adder, adder: Adder, new_name: NewName, fault: str, says: str
) -> None:
    adapter = random_adapter((oft_adder if fault == "OFT" else adder)[0], 1)
    config = json.loads(adapter.files[CONFIG_FILE])
    files = dict(adapter.files)
    key = "model.layers.2.self_attn.k_proj.oft_R"
    if fault == "rank":
        config["r"] = 64
    elif fault == "unknown target":
        config["target_modules"] = ["no_such_proj"]
    elif fault == "block size":
        config["oft_block_size"] = 8
    elif fault == "cut file":
        files[MODEL_FILE] = files[MODEL_FILE][:100]
    elif fault != "OFT":
        tensors = load(files[ROTATIONS_FILE])
        if fault == "layer missing":
            del tensors[key]
        else:
            tensors[key][3, 0, 0] = math.nan if fault == "not finite" else 0.5
        files[ROTATIONS_FILE] = save(tensors)
    files[CONFIG_FILE] = json.dumps(config).encode()
    name = new_name()
    with pytest.raises(GateError, match=f"{name}.*{says}"):
        sglang.load_adapter(name, AdapterFiles(1, files, "sha256:x"))
    assert name not in sglang.adapters()


LAYER = "model.layers.1.mlp.down_proj"
TABLE = f"manager.rotations.layers[{LAYER!r}].buffer[slot]"
SPOILED = {
    "transposed": (f"{TABLE}.copy_({TABLE}.transpose(-1, -2).clone())", f"{LAYER}.oft_R is transposed"),
    "zero": (f"{TABLE}.zero_()", f"{LAYER}.oft_R is zero"),
    "identity": (f"{TABLE}.copy_(__import__('torch').eye(16))", f"{LAYER}.oft_R is the identity"),
    "doubled": (f"{TABLE}.mul_(2)", f"{LAYER}.oft_R is 2 times"),
    "another layer's": (
        f"{TABLE}.copy_(manager.rotations.layers['model.layers.2.mlp.down_proj'].buffer[slot])",
        f"{LAYER}.oft_R holds model.layers.2.mlp.down_proj.oft_R",
    ),
    "switched off": ("manager.rotations.holds[slot] = False", "model.layers.0.mlp.down_proj.oft_R is missing"),
    "stale version": (
        "[layer.buffer[slot].copy_(layer.buffer[manager.memory_pool.uid_to_buffer_id[before]])"
        " for layer in manager.rotations.layers.values()]",
        "has other values",
    ),
}


@pytest.mark.parametrize("case", ["SGLang-OFT"], indirect=True)
@pytest.mark.parametrize("fault", sorted(SPOILED))
def test_a_rotation_that_changed_in_the_engine_is_caught_by_its_digest_and_named(
    sglang: ServedEngine, adder: Adder, new_name: NewName, run_inside: RunInside, fault: str
) -> None:
    policy, tokenizer = adder
    stale, name = new_name(), new_name()
    adapters = {stale: random_adapter(policy, 1), name: random_adapter(policy, 2)}
    for each, adapter in adapters.items():
        sglang.load_adapter(each, adapter)
    sglang.copies()[0].score(canary(tokenizer), [stale, name])
    assert sglang.copies()[0].adapter_digest(name) == adapters[name].digest
    assert sglang.copies()[0].explain_slot(name, adapters[name]) == ""
    code, says = SPOILED[fault]
    keys = "{each.lora_name: key for key, each in manager.lora_refs.items()}"
    run_inside(
        sglang,
        f"names = {keys}; before = names[{stale!r}]; "
        f"slot = manager.memory_pool.uid_to_buffer_id[names[{name!r}]]\n{code}",
    )
    trainer, expected = policy_scores(policy, adapters[name], canary(tokenizer))
    proof, _ = prove(
        adapters[name], name, sglang.copies()[0], (trainer, expected), canary(tokenizer), limits=Limits(1e-3),
        previous=None,
    )  # fmt: skip
    assert not proof.proven
    assert proof.slot_digest != adapters[name].digest
    assert proof.applied_digest != proof.expected_applied_digest
    assert says in proof.failures[0], proof.failures


def policy_scores(policy: Policy, adapter: AdapterFiles, tokens: list[int]) -> tuple[Scored, Scored]:
    """What the trainer would say of the canary, read by the torch engine."""
    engine = TorchEngine(policy, ChatTokenizer(builtin_folder("tiny-adder", "INT4")), max_running_requests=4)
    engine.load_adapter("trainer's", adapter)
    adapted, base = engine.copies()[0].score(tokens, ["trainer's", None])
    engine.close()
    return adapted, base


def test_a_publish_is_proven_and_its_predecessor_found_standing_by_one_request(
    sglang: ServedEngine, adder: Adder, new_name: NewName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question about its slots would stop a server that decodes."""
    policy, tokenizer = adder
    tokens = canary(tokenizer)

    async def asked() -> None:
        raise AssertionError("the server was asked about its slots")

    monkeypatch.setattr(sglang.replicas[0], "facts", asked)
    previous, names = None, (new_name(), new_name())
    for seed, name in enumerate(names):
        adapter = random_adapter(policy, seed)
        sglang.load_adapter(name, adapter)
        trainer = policy_scores(policy, adapter, tokens)
        proof, previous = prove(
            adapter, name, sglang.copies()[0], trainer, tokens, limits=Limits(1e-3), previous=previous
        )
        assert proof.proven, proof.failures
    for name in names:
        sglang.unload_adapter(name)


TRACED = """
import sys
from orbit_runtime.sglang_plugin import taps
find, taps.finds, taps.calls = taps._find_request, [], []
def note(_, event, called):
    if event == "c_call" and (called.__module__ in ("posix", "_io") or "_io." in repr(called)):
        taps.calls.append(called.__name__)
def traced(name):
    taps.finds.append(name)
    sys.setprofile(note)
    try:
        return find(name)
    finally:
        sys.setprofile(None)
taps._find_request = traced
"""


def test_passes_of_an_idle_server_look_at_no_file(
    sglang: ServedEngine, adder: Adder, new_name: NewName, run_inside: RunInside
) -> None:
    policy, tokenizer = adder
    name, adapter = new_name(), random_adapter(policy, 3)
    sglang.load_adapter(name, adapter)
    sglang.copies()[0].score(canary(tokenizer), [name])
    few = {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 4}, "lora_path": name}
    post(sglang, "/generate", few)
    run_inside(sglang, TRACED)
    post(sglang, "/generate", few)
    told = "from orbit_runtime.sglang_plugin import taps\nassert {}, (taps.finds, taps.calls)"
    run_inside(sglang, told.format("len(taps.finds) > 4 and not taps.calls"))
    (scored,) = sglang.copies()[0].score(canary(tokenizer), [name])
    assert scored.applied_digest == expected_applied_digest(adapter.files)
    run_inside(sglang, told.format("'open' in taps.calls"))
    sglang.unload_adapter(name)


def test_a_server_killed_in_mid_generation_loses_and_doubles_nothing(
    sglang: ServedEngine, adder: Adder, new_name: NewName
) -> None:
    policy, tokenizer = adder
    name, adapter = new_name(), random_adapter(policy, 7)
    sglang.load_adapter(name, adapter)
    before = sglang.replicas[0].restarts
    requests = requests_for(
        tokenizer, [f"{a}+{a}=" for a in range(10, 60)], 8, sampling=Sampling(max_new_tokens=24), adapter=name
    )
    killed = threading.Timer(0.5, lambda: os.killpg(server_of(sglang).pid, signal.SIGKILL))
    killed.start()
    completions = list(sample(sglang, requests))
    killed.join()
    assert sglang.replicas[0].restarts == before + 1
    assert len(completions) == len(by_id(completions)) == len(requests)
    assert {version for completion in completions for version in completion.versions_T} == {7}
    (scored,) = sglang.copies()[0].score(canary(tokenizer), [name])
    assert scored.applied_digest == expected_applied_digest(adapter.files)
    assert sglang.copies()[0].adapter_digest(name) == adapter.digest
    sglang.unload_adapter(name)


def test_a_server_that_cannot_start_is_told_with_its_log(tmp_path: Path) -> None:
    process = ServerProcess("SGLang", ["sh", "-c", "echo no such model >&2; exit 3"],
                            environment=os.environ, log=tmp_path / "log")  # fmt: skip
    with pytest.raises(EngineDiedError, match="ended with 3") as caught:
        process.wait_until(lambda: False, seconds=10)
    assert "no such model" in str(caught.value.fix)
    assert caught.value.exit_code == 82
    hung = ServerProcess("SGLang", ["sleep", "60"], environment=os.environ, log=tmp_path / "log2")
    with pytest.raises(EngineDiedError, match="wrote nothing to its log for 1 s"):
        hung.wait_until(lambda: False, seconds=1)
    started = time.monotonic()
    hung.stop()
    assert hung.exit_status() is not None
    assert time.monotonic() - started < 10
