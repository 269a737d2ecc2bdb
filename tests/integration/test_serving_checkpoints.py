"""A whole model in place of the served base: a real server, a real run's models, and transformers' own log-probs."""

from __future__ import annotations

import gc
import json
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.errors import GateError
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.policy import load_policy
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.serve.checkpoints import prove_checkpoint
from orbit_runtime.serve.open import ServedModels, ServeRequest, open_models
from orbit_runtime.serve.requests import ServeLimits
from orbit_runtime.serve.server import RunningServer, start_serving
from tests.integration.test_sft import trained as train
from tests.integration.test_whole_model import whole_manifest
from tests.integration.tiny_models import load_reference, make_checkpoint

MESSAGES = [{"role": "user", "content": "12+34="}]
MOST = 200
"""Tokens: a completion that takes a while."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, and `run`: two steps of training every weight of it."""
    folder = tmp_path_factory.mktemp("served")
    shutil.copytree(builtin_folder("tiny-adder", "BF16"), folder / "base")
    train(whole_manifest(model=str(folder / "base"), steps=2), folder / "run")
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """What the run trained."""
    (found,) = (folder / "run/models").glob("policy-v2")
    return found


@pytest.fixture(scope="module")
def opened(folder: Path) -> Iterator[ServedModels]:
    asked = ServeRequest(model=str(folder / "base"), updates_from=(str(folder),))
    opened = open_models(asked, ServeLimits(max_tokens=400), lambda _: None)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def serving(opened: ServedModels) -> Iterator[RunningServer]:
    serving = start_serving(opened, "127.0.0.1", 0, None)
    yield serving
    serving.close()


@pytest.fixture(scope="module")
def client(serving: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def raw(serving: RunningServer) -> Iterator[httpx.Client]:
    """After it, the base answers again."""
    with httpx.Client(base_url=serving.url, timeout=120) as client:
        yield client
        assert client.post("/reload_weights").status_code == 200


def answered(client: openai.OpenAI, **options: object) -> list[tuple[str, float]]:
    given = {"model": "base", "messages": MESSAGES, "seed": 5, "max_tokens": 8, "logprobs": True, **options}
    logprobs = client.chat.completions.create(**given).choices[0].logprobs
    assert logprobs is not None
    return [(token.token, token.logprob) for token in logprobs.content or ()]


def by_transformers(folder: Path, opened: ServedModels, count: int) -> list[float]:
    """Log-probs of the likeliest tokens, one after the other."""
    model, ids = load_reference(folder), opened.policies.base.tokenizer.encode_chat(MESSAGES)
    found = []
    with torch.no_grad():
        for _ in range(count):
            best = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1).max(-1)
            found.append(float(best.values))
            ids = [*ids, int(best.indices)]
    return found


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_trained_model_takes_the_bases_place_with_proof_and_the_base_comes_back_bit_for_bit(
    raw: httpx.Client, client: openai.OpenAI, opened: ServedModels, whole: Path
) -> None:
    before, digest = answered(client), opened.policies.base.policy.base_digest()
    listed = raw.get("/v1/models/base").json()
    said = raw.post("/update_weights", json={"checkpoint": str(whole)})
    assert said.status_code == 200, said.text
    update = said.json()
    assert (update["policy_version"], update["root"], update["tokenizer"]) == (2, str(whole), "same")
    assert update["proof"]["verdict"] == "proven"
    assert update["proof"]["tensors_compared"] == len(load_file(whole / "model.safetensors"))
    assert update["proof"]["packed_weights"] == 0
    assert update["proof"]["weights_digest"] == opened.policies.base.policy.base_digest() != digest
    assert raw.get("/v1/models/base").json()["digest"] == update["digest"] != listed["digest"]
    assert answered(client) != before
    found = [logprob for _, logprob in answered(client, temperature=0, max_tokens=3)]
    assert found == pytest.approx(by_transformers(whole, opened, len(found)), abs=1e-4)
    back = raw.post("/reload_weights").json()
    assert (back["digest"], back["root"]) == (listed["digest"], listed["root"])
    assert back["proof"]["weights_digest"] == opened.policies.base.policy.base_digest() == digest
    assert answered(client) == before
    assert raw.get("/v1/models/base").json() == listed


def test_answers_in_progress_end_under_the_weights_that_they_began_with(
    raw: httpx.Client, client: openai.OpenAI, opened: ServedModels, whole: Path
) -> None:
    options = {"model": "base", "prompt": "1+1=", "seed": 9, "n": 8, "max_tokens": MOST, "stream": True}
    options["extra_body"] = {"ignore_eos": True}

    def texts(then: Callable[[], None]) -> dict[int, str]:
        found = dict.fromkeys(range(8), "")
        for number, chunk in enumerate(client.completions.create(**options)):
            if number == 8:
                then()
            for choice in chunk.choices:
                found[choice.index] += choice.text
        return found

    alone = texts(lambda: None)
    before = answered(client)
    under_way: list[bool] = []

    def update() -> None:
        assert raw.post("/update_weights", json={"checkpoint": str(whole)}).status_code == 200
        under_way.append(bool(opened.engine.under_way))

    old = weakref.ref(opened.policies.base.policy.model)
    disturbed = texts(update)
    assert under_way == [True], "the answers were over before the weights changed: nothing was shown"
    assert disturbed == alone
    assert answered(client) != before
    gc.collect()
    until(lambda: old() is None)


def test_a_third_copy_is_refused_until_the_first_has_ended(
    raw: httpx.Client, client: openai.OpenAI, opened: ServedModels, whole: Path
) -> None:
    options = {"model": "base", "prompt": "1+1=", "seed": 9, "n": 32, "max_tokens": MOST, "stream": True}
    pieces = iter(client.completions.create(**options, extra_body={"ignore_eos": True}))
    next(pieces)
    assert raw.post("/update_weights", json={"checkpoint": str(whole)}).status_code == 200
    again = raw.post("/reload_weights")
    assert (again.status_code, again.json()["error"]["code"]) == (409, "still_answering")
    assert opened.policies.base.place == str(whole)
    assert sum(choice.finish_reason == "length" for chunk in pieces for choice in chunk.choices) == 32


def copied(whole: Path, name: str, *, recorded: bool = False) -> Path:
    target = whole.parents[2] / name
    shutil.copytree(whole, target, dirs_exist_ok=True)
    if not recorded:
        (target / "manifest.json").unlink()
    return target


def flipped(whole: Path) -> Path:
    target = copied(whole, "flipped", recorded=True)
    data = bytearray((target / "model.safetensors").read_bytes())
    data[-3] ^= 0x40
    (target / "model.safetensors").write_bytes(data)
    return target


def cut(whole: Path) -> Path:
    target = copied(whole, "cut")
    data = (target / "model.safetensors").read_bytes()
    (target / "model.safetensors").write_bytes(data[:-100])
    return target


def without_weights(whole: Path) -> Path:
    target = copied(whole, "empty")
    (target / "model.safetensors").unlink()
    return target


def without_a_tensor(whole: Path) -> Path:
    target = copied(whole, "partial")
    tensors = load_file(target / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, target / "model.safetensors")
    return target


def not_finite(whole: Path) -> Path:
    target = copied(whole, "infinite")
    tensors = load_file(target / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, target / "model.safetensors")
    return target


def of_other_constants(whole: Path) -> Path:
    target = copied(whole, "constants")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    return target


def of_another_tokenizer(whole: Path) -> Path:
    target = copied(whole, "tokenizer")
    rules = json.loads((target / "tokenizer.json").read_text())
    vocab = rules["model"]["vocab"]
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
    (target / "tokenizer.json").write_text(json.dumps(rules))
    return target


def of_another_format(whole: Path) -> Path:
    return shutil.copytree(builtin_folder("tiny-adder", "INT4"), whole.parents[2] / "int4", dirs_exist_ok=True)


def of_another_architecture(whole: Path) -> Path:
    return make_checkpoint(whole.parents[2] / "llama", "llama")


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a changed byte": (flipped, "SHA-256"),
    "a cut file": (cut, "truncated or damaged"),
    "no weights": (without_weights, "neither model.safetensors nor"),
    "a tensor less": (without_a_tensor, "model.layers.0.mlp.up_proj"),
    "NaN": (not_finite, "not finite"),
    "other constants": (of_other_constants, "rms_norm_eps is 0.5, the base's is"),
    "another tokenizer": (of_another_tokenizer, "its tokenizer is not the served base's"),
    "another format": (of_another_format, "the checkpoint is INT4, the served base BF16"),
    "another architecture": (of_another_architecture, "another than the served base"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_take_the_bases_place_is_refused_with_its_reason_and_the_base_stays(
    raw: httpx.Client, client: openai.OpenAI, whole: Path, name: str
) -> None:
    make, words = REFUSED[name]
    before = answered(client)
    given = make(whole)
    said = raw.post("/update_weights", json={"checkpoint": str(given)})
    assert said.status_code == 422, said.text
    error = said.json()["error"]
    assert (error["code"], error["param"]) == ("checkpoint_refused", "checkpoint")
    assert words in error["message"]
    assert given.name in error["message"], "where"
    assert answered(client) == before


def test_a_checkpoint_without_a_tokenizer_keeps_the_bases(raw: httpx.Client, whole: Path) -> None:
    given = copied(whole, "bare")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (given / name).unlink(missing_ok=True)
    said = raw.post("/update_weights", json={"checkpoint": str(given)})
    assert (said.status_code, said.json()["tokenizer"]) == (200, "base's"), said.text


def test_bodies_and_places_that_mean_nothing_are_refused(raw: httpx.Client, whole: Path, tmp_path: Path) -> None:
    for body, status in (
        ({}, 400),
        ({"adapter": str(whole), "checkpoint": str(whole)}, 400),
        ({"checkpoint": str(whole), "model": "policy"}, 400),
        ({"checkpoint": str(tmp_path)}, 403),
        ({"checkpoint": str(whole / "nothing")}, 422),
    ):
        assert raw.post("/update_weights", json=body).status_code == status, body


def test_adapters_over_the_base_are_put_back_first(tmp_path: Path, folder: Path, whole: Path) -> None:
    adapter = folder / "adapted"
    manifest = whole_manifest(model=str(folder / "base"), steps=1)
    manifest["spec"]["adapter"] = {"type": "LoRA"}
    train(manifest, adapter)
    asked = ServeRequest(model=str(folder / "base"), adapters={"policy": str(adapter)}, updates_from=(str(folder),))
    opened = open_models(asked, ServeLimits(), lambda _: None)
    serving = start_serving(opened, "127.0.0.1", 0, None)
    with httpx.Client(base_url=serving.url, timeout=60) as raw:
        said = raw.post("/update_weights", json={"checkpoint": str(whole)})
        assert said.status_code == 409
        assert "policy" in said.json()["error"]["message"]
        assert raw.post("/reload_weights").json()["id"] == "policy"
        assert raw.post("/update_weights", json={"checkpoint": str(whole)}).status_code == 200
        listed = raw.get("/v1/models").json()["data"]
        assert len({each["digest"] for each in listed}) == 1, "a name that stands for the base follows it"
        refused = raw.post("/update_weights", json={"adapter": str(adapter), "model": "policy"})
        assert refused.status_code == 422
        assert "another base" in refused.json()["error"]["message"]
        assert raw.post("/reload_weights").json()["id"] == "base"
        assert raw.post("/update_weights", json={"adapter": str(adapter), "model": "policy"}).status_code == 200
    serving.close()
    opened.close()


def test_weights_of_a_packed_format_are_replaced_as_well(tmp_path: Path) -> None:
    base = builtin_folder("tiny-adder", "INT4")
    other = Path(shutil.copytree(base, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] *= 2
    save_file(tensors, other / "model.safetensors")
    opened = open_models(
        ServeRequest(model="builtin://tiny-adder", updates_from=(str(tmp_path),)), ServeLimits(), lambda _: None
    )
    said = opened.policies.load_checkpoint(str(other))
    assert said["proof"]["packed_weights"] > 0
    assert said["proof"]["tensors_compared"] > 0
    assert said["proof"]["canary_error"] <= said["proof"]["canary_limit"]
    opened.close()


def test_an_engine_over_other_weights_than_the_files_is_not_proven(folder: Path, whole: Path) -> None:
    policy = load_policy(folder / "base", AdapterConfig("LoRA", ()))
    engine = TorchEngine(policy, ChatTokenizer(folder / "base"), max_running_requests=2)
    prove_checkpoint(engine, policy, folder / "base", range(3, 20), limit=1e-3)
    with pytest.raises(GateError, match="the engine holds other values of"):
        prove_checkpoint(engine, policy, whole, range(3, 20), limit=1e-3)
