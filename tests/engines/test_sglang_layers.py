"""Looking into a real SGLang server's layers: a healthy one parts nowhere from the trainer, a broken one is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from orbit_runtime.adapters.state import load_slot, remove_slot
from orbit_runtime.cli.main import run_command
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.parity.locate import Location, locate
from orbit_runtime.policy import Policy
from orbit_runtime.policy.snapshot import ROTARY, take_snapshot
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.types import AdapterFiles
from tests.engines.servers import Adder, post_to, server_of, start_server
from tests.integration.engine_inputs import random_adapter


def compare(
    engine: ServedEngine, policy: Policy, tokens: list[int], adapter: AdapterFiles, name: str | None
) -> Location:
    """The trainer holds `adapter` in a slot of its own."""
    slot = "compared" if name else None
    if slot:
        load_slot(policy.injected.layers, slot, adapter.files)
    try:
        ours = take_snapshot(policy, tokens, slot, adapter.files)
        again = take_snapshot(policy, tokens, slot, adapter.files, copies=3)
    finally:
        if slot:
            remove_slot(policy.injected.layers, slot)
    return locate(ours, again, engine.copies()[0].snapshot(tokens, name), dtype="float32", group=32)


def tokens_of(tokenizer: ChatTokenizer) -> list[int]:
    return [*tokenizer.encode_chat([{"role": "user", "content": "12+34="}]), 9, 12]


def base_folder(engine: ServedEngine) -> Path:
    return server_of(engine)._settings.model


@pytest.mark.parametrize("case", ["SGLang", "SGLang-OFT"], indirect=True)
def test_a_healthy_server_parts_nowhere(engine: ServedEngine, adder: Adder, new_name: Callable[[], str]) -> None:
    policy, tokenizer = adder
    name, adapter = new_name(), random_adapter(policy, 3)
    engine.load_adapter(name, adapter)
    tokens = tokens_of(tokenizer)
    for asked in (None, name):
        snapshot = engine.copies()[0].snapshot(tokens, asked)
        assert len(snapshot.points) == 1 + 4 * 12 + 1, list(snapshot.points)
        found = compare(engine, policy, tokens, adapter, asked)
        assert found.is_clear, found.sentence()
        assert found.not_compared == ()


@pytest.mark.parametrize("layer", range(4))
def test_another_value_in_a_servers_weight_is_named(
    lora_server: ServedEngine, lora_adder: Adder, layer: int, tmp_path: Path
) -> None:
    """Through SGLang's own endpoint for new weights, so that the server runs on."""
    policy, tokenizer = lora_adder
    healthy, broken = base_folder(lora_server), tmp_path / "broken"
    shutil.copytree(healthy, broken)
    (file,) = broken.glob("*.safetensors")
    tensors = load_file(file)
    name = f"model.layers.{layer}.mlp.up_proj"
    tensors[f"{name}.weight"][11, 40] += 0.05
    save_file(tensors, file, metadata={"format": "pt"})
    update_weights(lora_server, broken)
    try:
        found = compare(lora_server, policy, tokens_of(tokenizer), random_adapter(policy, 1), None)
    finally:
        update_weights(lora_server, healthy)
    assert found.point == name, found.sentence()
    (cause,) = found.causes
    assert (cause.kind, cause.name) == ("base tensor", f"{name}.weight")
    assert "first at [11, 40]" in cause.detail
    assert not compare(lora_server, policy, tokens_of(tokenizer), random_adapter(policy, 1), None).found


def test_a_slice_of_a_servers_adapter_is_named(
    lora_server: ServedEngine, lora_adder: Adder, new_name: Callable[[], str]
) -> None:
    policy, tokenizer = lora_adder
    name, published, held = new_name(), random_adapter(policy, 1), random_adapter(policy, 2)
    lora_server.load_adapter(name, held)
    found = compare(lora_server, policy, tokens_of(tokenizer), published, name)
    assert found.point == "model.layers.0.self_attn.q_proj"
    assert {cause.kind for cause in found.causes} == {"adapter tensor"}
    assert found.causes[0].name == "model.layers.0.self_attn.q_proj.lora_A"
    assert "values differ, first at" in found.causes[0].detail
    lora_server.unload_adapter(name)


@pytest.fixture
def misconfigured(
    request: pytest.FixtureRequest, lora_server: ServedEngine, lora_adder: Adder, tmp_path: Path
) -> Iterator[ServedEngine]:
    """A server whose config.json says something else than the checkpoint's."""
    folder = tmp_path / "base"
    shutil.copytree(base_folder(lora_server), folder)
    config = json.loads((folder / "config.json").read_text())
    request.param(config)
    (folder / "config.json").write_text(json.dumps(config))
    yield from start_server(lora_adder, tmp_path, oft_block_size=0, base=folder)


def other_epsilon(config: dict) -> None:
    config["rms_norm_eps"] = 1e-3


def other_rope(config: dict) -> None:
    for holder in (config, config.get("rope_parameters") or {}):
        if "rope_theta" in holder:
            holder["rope_theta"] *= 2


@pytest.mark.parametrize("misconfigured", [other_epsilon, other_rope], indirect=True)
def test_another_configuration_is_named(
    request: pytest.FixtureRequest, misconfigured: ServedEngine, lora_adder: Adder
) -> None:
    policy, tokenizer = lora_adder
    found = compare(misconfigured, policy, tokens_of(tokenizer), random_adapter(policy, 1), None)
    epsilon = request.node.callspec.params["misconfigured"] is other_epsilon
    assert found.point == ("model.layers.0.input_layernorm" if epsilon else "model.layers.0.self_attn.query")
    assert found.causes[0].kind == "constant"
    assert found.causes[0].name == (
        "model.layers.0.input_layernorm.eps" if epsilon else f"model.layers.0.self_attn.{ROTARY}"
    )


def update_weights(engine: ServedEngine, folder: Path) -> None:
    body = {"model_path": str(folder), "flush_cache": True}
    answer = post_to(engine, "/update_weights_from_disk", body)
    assert answer.json()["success"], answer.text


def test_the_command_looks_into_the_servers_layers(capsys: pytest.CaptureFixture[str]) -> None:
    example = str(Path(__file__).resolve().parents[2] / "examples" / "quickstart.yaml")
    arguments = ["parity", example, "--set", "spec.rollout.engine=SGLang", "--layers", "--json"]
    assert run_command(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["engine"] == "SGLang"
    assert found["location"] == {
        "point": None, "difference": 0.0, "limit": 2e-05, "causes": [], "missing": [], "not_compared": [],
        "rerouted": None, "sentence": "in no layer beyond the floor",
    }  # fmt: skip
