"""Files, digests and strict loading: healthy ones agree everywhere, and every fault shows."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor, nn

from orbit_runtime.adapters import state
from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.files import expected_applied_digest, files_digest
from orbit_runtime.adapters.inject import InjectedAdapter, inject
from orbit_runtime.adapters.layer import AppliedTensors
from orbit_runtime.errors import InternalError, ModelError

TARGETS = ("q_proj", "k_proj", "up_proj")
LORA = AdapterConfig("LoRA", TARGETS, rank=4, alpha=6.0)
OFT = AdapterConfig("OFT", TARGETS, block_size=8)
CAYLEY = AdapterConfig("OFT", TARGETS, block_size=8, parametrization="Cayley")
CONFIGS = pytest.mark.parametrize("config", [LORA, OFT, CAYLEY], ids=["LoRA", "OFT", "OFT-exact"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(32, 24), nn.Linear(32, 24)
        self.up_proj = nn.Linear(24, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up_proj(torch.tanh(self.q_proj(x) * self.k_proj(x)))


def adapted(config: AdapterConfig, seed: int = 0) -> tuple[nn.Module, InjectedAdapter]:
    torch.manual_seed(11)
    model = nn.Sequential(Block(), Block())
    injected = inject(model, config.targets, config, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in injected.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.05
    return model, injected


def published(config: AdapterConfig, seed: int = 0) -> dict[str, bytes]:
    return state.export_adapter(adapted(config, seed)[1], config, "base")


X = torch.randn(6, 32, generator=torch.Generator().manual_seed(5))


@CONFIGS
def test_a_slot_reads_back_as_the_bytes_it_was_loaded_from(config: AdapterConfig) -> None:
    files, (_, engine) = published(config), adapted(config, seed=9)
    state.load_slot(engine.layers, "policy-v1", files)
    again = state.slot_files(engine.layers, "policy-v1", files["adapter_config.json"])
    assert again == files
    assert files_digest(again) == files_digest(files)


@CONFIGS
def test_equal_masters_give_equal_bytes(config: AdapterConfig) -> None:
    assert published(config) == published(config)
    assert files_digest(published(config)) != files_digest(published(config, seed=1))


@CONFIGS
def test_trainer_and_engine_compute_the_same_bits_and_prove_it(config: AdapterConfig) -> None:
    model, injected = adapted(config)
    files = state.export_adapter(injected, config, "base")
    state.load_slot(injected.layers, "policy-v1", files)
    digests, outputs = [], []
    for slot in ("trainer", "policy-v1"):
        with injected.selection.use(slot):
            trace: list[AppliedTensors] = []
            injected.selection.trace = trace.append
            outputs.append(model(X).detach())
            digests.append(state.applied_digest(trace))
    assert digests == [expected_applied_digest(files)] * 2
    assert torch.equal(*outputs)


@CONFIGS
def test_safetensors_itself_reads_the_files(config: AdapterConfig) -> None:
    tensors = load(published(config)["adapter_model.safetensors"])
    assert "base_model.model.0.q_proj." + ("lora_A.weight" if config.type == "LoRA" else "oft_R.weight") in tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16 if config.type == "LoRA" else torch.float32}


@CONFIGS
@given(data=st.data())
@settings(max_examples=40)
def test_one_changed_bit_of_any_file_changes_the_digest(config: AdapterConfig, data: st.DataObject) -> None:
    files = published(config)
    name = data.draw(st.sampled_from(sorted(files)))
    bit = data.draw(st.integers(0, len(files[name]) * 8 - 1))
    damaged = bytearray(files[name])
    damaged[bit // 8] ^= 1 << bit % 8
    assert files_digest(files | {name: bytes(damaged)}) != files_digest(files)


@CONFIGS
@given(data=st.data())
@settings(max_examples=40)
def test_one_changed_bit_in_a_slot_changes_what_is_read_back(config: AdapterConfig, data: st.DataObject) -> None:
    files, (model, engine) = published(config), adapted(config)
    state.load_slot(engine.layers, "policy-v1", files)
    layer = data.draw(st.sampled_from([engine.layers["0.q_proj"], engine.layers["1.up_proj"]]))
    tensor = data.draw(st.sampled_from(sorted(layer.slots["policy-v1"].tensors().items())))[1]
    words = tensor.view(-1).view(torch.int32)
    words[data.draw(st.integers(0, words.numel() - 1))] ^= 1 << data.draw(st.integers(0, 30))
    again = state.slot_files(engine.layers, "policy-v1", files["adapter_config.json"])
    assert files_digest(again) != files_digest(files)
    trace: list[AppliedTensors] = []
    engine.selection.trace = trace.append
    with torch.no_grad(), engine.selection.use("policy-v1"):
        model(X)
    assert state.applied_digest(trace) != expected_applied_digest(files)


def test_a_changed_scaling_shows() -> None:
    files, (model, engine) = published(LORA), adapted(LORA)
    state.load_slot(engine.layers, "policy-v1", files)
    engine.layers["1.up_proj"].slots["policy-v1"].scaling = 1.0
    again = state.slot_files(engine.layers, "policy-v1", files["adapter_config.json"])
    assert files_digest(again) != files_digest(files)
    trace: list[AppliedTensors] = []
    engine.selection.trace = trace.append
    with torch.no_grad(), engine.selection.use("policy-v1"):
        model(X)
    assert state.applied_digest(trace) != expected_applied_digest(files)


def test_a_layer_that_did_not_take_part_shows() -> None:
    files, (model, engine) = published(LORA), adapted(LORA)
    state.load_slot(engine.layers, "policy-v1", files)
    trace: list[AppliedTensors] = []
    engine.selection.trace = trace.append
    with torch.no_grad(), engine.selection.use("policy-v1"):
        model[0](X)
    assert state.applied_digest(trace) != expected_applied_digest(files)


KEY = "base_model.model.0.k_proj."
FIRST = {"LoRA": KEY + "lora_B.weight", "OFT": KEY + "oft_R.weight"}
Tensors = dict[str, Tensor]


def dropped(tensors: Tensors, key: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != key}


FAULTS: dict[str, Callable[[Tensors, str], Tensors]] = {
    "missing": dropped,
    "extra": lambda tensors, key: tensors | {"base_model.model.7.q_proj.lora_A.weight": tensors[key].clone()},
    "wrong prefix": lambda tensors, key: dropped(tensors, key) | {key.removeprefix("base_model."): tensors[key]},
    "wrong shape": lambda tensors, key: tensors | {key: tensors[key].t().contiguous()},
    "wrong dtype": lambda tensors, key: tensors | {key: tensors[key].to(torch.float16)},
    "widened or narrowed": lambda tensors, key: (
        tensors | {key: tensors[key].to(torch.float32 if tensors[key].dtype == torch.bfloat16 else torch.bfloat16)}
    ),
    "not finite": lambda tensors, key: tensors | {key: torch.full_like(tensors[key], float("nan"))},
}


@CONFIGS
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_faulty_tensor_is_refused_and_nothing_is_loaded(config: AdapterConfig, fault: str) -> None:
    files, (_, engine) = published(config), adapted(config)
    tensors = FAULTS[fault](load(files["adapter_model.safetensors"]), FIRST[config.type])
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
        state.load_slot(engine.layers, "policy-v1", files | {"adapter_model.safetensors": save(tensors)})
    assert all(layer.slots == {} for layer in engine.layers.values())


def test_layers_that_share_an_input_must_share_the_rotation() -> None:
    files, (_, engine) = published(OFT), adapted(OFT)
    tensors = load(files["adapter_model.safetensors"])
    tensors[FIRST["OFT"]] = tensors[FIRST["OFT"]] * 1.0001
    with pytest.raises(ModelError, match="which takes the same input"):
        state.load_slot(engine.layers, "policy-v1", files | {"adapter_model.safetensors": save(tensors)})


def test_a_rotation_of_other_parameters_is_refused() -> None:
    files, (_, engine) = published(OFT), adapted(OFT)
    turned = load(files["rotations.safetensors"])
    turned["1.up_proj.oft_R"] = turned["1.up_proj.oft_R"].transpose(1, 2).contiguous()
    with pytest.raises(ModelError, match=r"1\.up_proj\.oft_R is not the rotation"):
        state.load_slot(engine.layers, "policy-v1", files | {"rotations.safetensors": save(turned)})


@pytest.mark.parametrize("cut", [4, 100, -1])
def test_a_truncated_file_is_refused(cut: int) -> None:
    files, (_, engine) = published(LORA), adapted(LORA)
    whole = files["adapter_model.safetensors"]
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
        state.load_slot(engine.layers, "policy-v1", files | {"adapter_model.safetensors": whole[:cut]})


@CONFIGS
def test_a_missing_or_additional_file_is_refused(config: AdapterConfig) -> None:
    files, (_, engine) = published(config), adapted(config)
    for name in files:
        with pytest.raises(ModelError, match="missing"):
            state.load_slot(engine.layers, "policy-v1", {key: value for key, value in files.items() if key != name})
    with pytest.raises(ModelError, match="does not belong"):
        state.load_slot(engine.layers, "policy-v1", files | {"more.safetensors": b""})


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (LORA, "lora_alpha", 7),
        (LORA, "r", 8),
        (LORA, "use_rslora", True),
        (LORA, "alpha_pattern", {"q_proj": 1}),
        (LORA, "peft_type", "OFT"),
        (OFT, "use_cayley_neumann", False),
        (OFT, "num_cayley_neumann_terms", 4),
        (OFT, "oft_block_size", 16),
    ],
)
def test_a_configuration_that_means_another_adapter_is_refused(config: AdapterConfig, key: str, value: object) -> None:
    files, (_, engine) = published(config), adapted(config)
    changed = json.dumps(json.loads(files["adapter_config.json"]) | {key: value}).encode()
    with pytest.raises(ModelError, match=key):
        state.load_slot(engine.layers, "policy-v1", files | {"adapter_config.json": changed})


def test_a_slot_s_name_is_used_once() -> None:
    files, (_, engine) = published(LORA), adapted(LORA)
    state.load_slot(engine.layers, "policy-v1", files)
    for name in ("policy-v1", "trainer"):
        with pytest.raises(InternalError, match=name):
            state.load_slot(engine.layers, name, files)
    state.remove_slot(engine.layers, "policy-v1")
    state.remove_slot(engine.layers, "policy-v1")
    state.load_slot(engine.layers, "policy-v1", files)
