"""PEFT itself loads the published files and computes the same: outputs, and gradients of the adapter's parameters."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from orbit_runtime.adapters import state
from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.inject import InjectedAdapter, inject
from orbit_runtime.adapters.oft import rotations

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA = AdapterConfig("LoRA", TARGETS, rank=8, alpha=12.0)
NEUMANN = AdapterConfig("OFT", TARGETS, block_size=16)
CAYLEY = replace(NEUMANN, parametrization="Cayley")
CONFIGS = pytest.mark.parametrize("config", [LORA, NEUMANN, CAYLEY], ids=["LoRA", "OFT", "OFT-exact"])
IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(4))


def tiny_model() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).eval()


def adapted(config: AdapterConfig) -> tuple[nn.Module, InjectedAdapter]:
    model = tiny_model()
    injected = inject(model, TARGETS, config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in injected.masters.parameters.items():
            noise = torch.randn(parameter.shape, generator=generator) * 0.05
            # PEFT computes with what it read, so the gradient of LoRA is compared where reading loses nothing.
            parameter.copy_((parameter + noise).bfloat16() if "lora" in name else parameter + noise)
    return model, injected


def in_peft(files: dict[str, bytes], folder: Path, trainable: bool = False) -> nn.Module:
    import peft

    for name, data in files.items():
        (folder / name).write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return peft.PeftModel.from_pretrained(tiny_model(), folder, is_trainable=trainable)


def logits_and_loss(model: nn.Module) -> tuple[Tensor, Tensor]:
    logits = model(input_ids=IDS).logits
    return logits, nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


def exact_rotation(config: AdapterConfig) -> AdapterConfig:
    return replace(config, rotation_dtype="F32")


@CONFIGS
def test_peft_computes_the_same_log_probs_from_the_published_files(config: AdapterConfig, tmp_path: Path) -> None:
    files = state.export_adapter(adapted(config)[1], config, "tiny")
    model, injected = adapted(exact_rotation(config))
    with torch.no_grad(), injected.selection.use("trainer"):
        ours = logits_and_loss(model)[0].log_softmax(-1)
    with torch.no_grad():
        theirs = logits_and_loss(in_peft(files, tmp_path))[0].log_softmax(-1)
        base = logits_and_loss(tiny_model())[0].log_softmax(-1)
    assert (ours - theirs).abs().max() <= 1e-5
    assert (ours - base).abs().max() > 0.1, "the adapter must matter, or nothing was compared"


@CONFIGS
def test_gradients_equal_those_of_peft(config: AdapterConfig, tmp_path: Path) -> None:
    files = state.export_adapter(adapted(config)[1], config, "tiny")
    model, injected = adapted(exact_rotation(config))
    with injected.selection.use("trainer"):
        logits_and_loss(model)[1].backward()
    peft_model = in_peft(files, tmp_path, trainable=True)
    logits_and_loss(peft_model)[1].backward()
    theirs: dict[str, Tensor] = {}
    owner = injected.masters.owner
    for name, parameter in peft_model.named_parameters():
        if parameter.requires_grad:
            module, _, kind = name.removeprefix("base_model.model.").removesuffix(".default.weight").rpartition(".")
            key = f"{owner[module]}.{kind}"
            # A parameter that projections share receives the sum of what PEFT's separate ones receive.
            theirs[key] = theirs.get(key, torch.zeros(())) + parameter.grad
    assert theirs.keys() == injected.masters.parameters.keys()
    for key, parameter in injected.masters.parameters.items():
        scale = theirs[key].abs().max()
        assert scale > 0
        torch.testing.assert_close(parameter.grad, theirs[key], rtol=1e-4, atol=float(scale) * 1e-4)


@pytest.mark.parametrize("config", [NEUMANN, CAYLEY], ids=["OFT", "OFT-exact"])
def test_rounding_the_rotation_to_bf16_costs_little(config: AdapterConfig) -> None:
    outputs = []
    for variant in (config, exact_rotation(config)):
        model, injected = adapted(variant)
        with torch.no_grad(), injected.selection.use("trainer"):
            outputs.append(logits_and_loss(model)[0].log_softmax(-1))
    difference = (outputs[0] - outputs[1]).abs()
    print(f"mean |Δ log-prob| {difference.mean():.2e}, max {difference.max():.2e}")
    assert 0 < difference.mean() < 0.02


def test_the_two_parametrisations_rotate_in_opposite_directions() -> None:
    parameters = torch.randn(3, 28, generator=torch.Generator().manual_seed(1)) * 0.01
    exact, series = rotations(parameters, 8, "Cayley", 5), rotations(parameters, 8, "CayleyNeumann", 5)
    torch.testing.assert_close(series, exact.transpose(1, 2), rtol=0, atol=1e-4)
    assert (series - exact).abs().max() > 0.01


@pytest.mark.parametrize("terms", range(1, 9))
def test_the_series_is_peft_s_for_every_number_of_terms(terms: int) -> None:
    from peft.tuners.oft.layer import OFTRotationModule

    parameters = torch.randn(3, 28, generator=torch.Generator().manual_seed(1)) * 0.2
    module = OFTRotationModule(3, 28, 8, 24)
    expected = module._cayley_batch(parameters, 8, True, terms)
    torch.testing.assert_close(rotations(parameters, 8, "CayleyNeumann", terms), expected, rtol=1e-6, atol=1e-6)
