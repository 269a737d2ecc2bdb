"""W8A8 and W4A4 in a whole model: against transformers with compressed-tensors' rounding; the adapter; errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp, generate_gparam
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.layer import TRAINER_SLOT
from orbit_runtime.errors import ManifestError
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.policy.packed import Branch
from orbit_runtime.quant.formats import FORMATS, format_of
from orbit_runtime.quant.linear import FrozenLinear
from tests.integration.tiny_models import TARGETS, reference_logprobs

LORA = AdapterConfig(type="LoRA", targets=TARGETS, rank=4, alpha=8.0)
TOKENS = [3, 27, 26, 20, 27, 25, 38, 1, 4, 30, 31, 1]
BLOCKS = QuantizationArgs(num_bits=8, type="float", strategy="group", group_size=128, dynamic=True)
NVFP4 = QuantizationArgs(
    num_bits=4, type="float", strategy="tensor_group", group_size=16, dynamic="local", scale_dtype=torch.float8_e4m3fn
)


def load(precision: str, activations: str) -> Policy:
    return load_policy(
        builtin_folder("tiny-adder", precision),
        LORA,
        activation_precision=activations,  # type: ignore[arg-type]
    )


def logprobs(policy: Policy) -> Tensor:
    with torch.no_grad():
        return policy.logprobs(policy.pack([Branch(0, TOKENS[:1], TOKENS[1:])]))[0]


def vendor_rounded(x: Tensor, layout: str) -> Tensor:
    if layout.startswith("FP8Block"):
        scale, zero = compute_dynamic_scales_and_zp(x, BLOCKS, nn.Module())
        return fake_quantize(x, scale, zero, BLOCKS)
    rows = []
    for row in x.reshape(-1, x.shape[-1]).split(1):
        whole = generate_gparam(row.amin(), row.amax())
        scale, zero = compute_dynamic_scales_and_zp(row, NVFP4, nn.Module(), whole)
        rows.append(fake_quantize(row, scale, zero, NVFP4, global_scale=whole))
    return torch.cat(rows).view(x.shape)


def reference(policy: Policy, folder: Path) -> Tensor:
    """transformers' own model over the dequantised weights; before each linear the vendor rounds its input."""
    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    state, packed = {}, {}
    for name, module in policy.model.named_modules():
        if isinstance(module, FrozenLinear):
            plain = name.removesuffix(".base")
            state[f"{plain}.weight"] = FORMATS[format_of(module.packed)].dequantize(module.packed, torch.float32)
            packed[plain] = module.format
    for name, parameter in policy.model.named_parameters():
        if name in model.state_dict():
            state[name] = parameter.detach()
    state["model.embed_tokens.weight"] = policy.model.get_input_embeddings().weight.float()
    missing = model.load_state_dict(state, strict=False)
    assert not missing.missing_keys, missing
    for name, module in model.named_modules():
        layout = packed.get(name, "BF16")
        if isinstance(module, nn.Linear) and layout != "BF16":
            module.register_forward_pre_hook(lambda _, inputs, layout=layout: (vendor_rounded(inputs[0], layout),))
    return reference_logprobs(model, TOKENS)


@pytest.mark.parametrize("precision", ["FP8", "NVFP4"])
def test_logprobs_are_those_of_transformers_with_the_vendors_rounding(precision: str) -> None:
    policy = load(precision, precision)
    expected = reference(policy, builtin_folder("tiny-adder", precision))
    found = logprobs(policy)
    # A difference of 1e-7 can put a value on the other side of a tie: a step of the format, in one of many values.
    assert (found - expected).abs().mean() < 1e-3
    assert (found - logprobs(load(precision, "WeightOnly"))).abs().mean() > 5 * (found - expected).abs().mean()


@pytest.mark.parametrize("precision", ["FP8", "NVFP4"])
def test_the_adapter_gets_a_gradient(precision: str) -> None:
    policy = load(precision, precision)
    with policy.injected.selection.use(TRAINER_SLOT):
        values, _ = policy.logprobs(policy.pack([Branch(0, TOKENS[:1], TOKENS[1:])]))
    values.sum().backward()
    gradients = [parameter.grad for parameter in policy.injected.parameters()]
    assert any(gradient is not None and bool(gradient.abs().sum() > 0) for gradient in gradients)


@pytest.mark.parametrize(("precision", "activations"), [("INT4", "FP8"), ("BF16", "NVFP4"), ("FP8", "NVFP4")])
def test_activations_of_a_format_that_no_weight_has_are_refused(precision: str, activations: str) -> None:
    with pytest.raises(ManifestError, match=f"no weight of the checkpoint is {activations}") as caught:
        load(precision, activations)
    assert caught.value.where == "spec.model.activationPrecision"
    assert caught.value.exit_code == 64
