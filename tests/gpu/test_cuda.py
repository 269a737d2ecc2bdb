"""The same code on a CUDA device: values, sampling, an update, a proven publish. Skipped where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.loop import run
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.policy import load_policy
from orbit_runtime.policy.packed import Branch
from orbit_runtime.spec import OrbitRun
from tests.integration.killing import small_manifest
from tests.integration.tiny_models import TARGETS

pytestmark = pytest.mark.gpu
LORA = AdapterConfig(type="LoRA", targets=TARGETS, rank=4, alpha=8.0)
TOKENS = [3, 27, 26, 20, 27, 25, 38, 1, 4, 30, 31, 1]


@pytest.mark.parametrize("precision", ["BF16", "INT4"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_logprobs_on_the_device_equal_those_on_the_cpu(precision: str, dtype: torch.dtype, bound: float) -> None:
    folder = builtin_folder("tiny-adder", precision)
    cpu = load_policy(folder, LORA)
    gpu = load_policy(folder, LORA, device="cuda", compute_dtype=dtype)
    with torch.no_grad():
        expected, _ = cpu.logprobs(cpu.pack([Branch(0, TOKENS[:4], TOKENS[4:])]))
        found, _ = gpu.logprobs(gpu.pack([Branch(0, TOKENS[:4], TOKENS[4:])]))
    assert (found.cpu() - expected).abs().max() < bound
    assert gpu.base_digest() == cpu.base_digest()


def test_logits_on_the_device_are_rounded_to_fp32_only() -> None:
    policy = load_policy(builtin_folder("tiny-adder", "BF16"), LORA, device="cuda", compute_dtype=torch.bfloat16)
    weight = policy.model.get_output_embeddings().packed.qdata
    hidden = torch.randn(40, weight.shape[1], device="cuda").mul_(3).bfloat16().requires_grad_(True)
    logits = policy.head(hidden)
    exact = hidden.detach().double() @ weight.double().T
    assert logits.dtype == torch.float32
    assert float((logits.detach() - exact).abs().max()) < 1e-3
    (grad,) = torch.autograd.grad(logits.square().sum(), hidden)
    expected = 2 * exact @ weight.double()
    torch.testing.assert_close(grad.double(), expected, rtol=2**-6, atol=float(expected.abs().max()) * 2**-6)


@pytest.mark.parametrize("adapter", ["LoRA", "OFT"])
def test_a_run_on_the_device_proves_every_publish(tmp_path: Path, adapter: str) -> None:
    manifest = small_manifest(steps=5, adapter=adapter)
    result = run(OrbitRun.model_validate(manifest), out=str(tmp_path / "run"), progress=SilentProgress())
    assert result.report["publishes"] == result.report["publishes_proven"] == 6
    assert json.loads((tmp_path / "run" / "run.json").read_text())["device"] == "cuda"
    assert result.report["base_digest_before"] == result.report["base_digest_after"]
