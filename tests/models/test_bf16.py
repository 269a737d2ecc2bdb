"""Runs that compute in BF16, as every GPU does: no gate stops a healthy one, and what it chose holds on resume."""

from __future__ import annotations

import copy
import itertools
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cosine_similarity

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.layer import TRAINER_SLOT
from orbit_runtime.errors import GateError
from orbit_runtime.loop import run
from orbit_runtime.model_info.builtin_models import any_builtin_folder
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.policy import Policy, load_policy, native
from orbit_runtime.policy.attention import layers_of
from orbit_runtime.policy.direct import LinearGroup, find_blocks
from orbit_runtime.policy.packed import Branch
from orbit_runtime.quant.bf16 import BF16Weight
from orbit_runtime.quant.expert_linear import FrozenExpertLinear
from orbit_runtime.quant.linear import FrozenLinear
from orbit_runtime.rollout.decoding import DecodingBatch
from orbit_runtime.spec import OrbitRun
from tests.integration.killing import small_manifest

FORMATS = {
    "tiny-adder": ("BF16", "INT4", "FP8", "NVFP4", "MXFP4"), "tiny-qwen3": ("BF16", "FP8"), "tiny-llama": ("BF16",),
    "tiny-qwen3-moe": ("FP8", "NVFP4"), "tiny-moe-adder": ("INT4",), "tiny-kimi-k2": ("INT4",),
    "tiny-glm4-moe": ("FP8",), "tiny-gpt-oss": ("MXFP4",), "tiny-deepseek-v4": ("MXFP4",),
}  # fmt: skip
SHORT = (
    ("tiny-adder", "INT4", "LoRA", 0), ("tiny-adder", "NVFP4", "OFT", 0), ("tiny-qwen3", "BF16", "LoRA", 0),
    ("tiny-qwen3-moe", "FP8", "LoRA", 0), ("tiny-qwen3-moe", "NVFP4", "LoRA", 0),
)  # fmt: skip
CASES = [
    case if case in SHORT else pytest.param(*case, marks=pytest.mark.long)
    for model, precisions in FORMATS.items()
    for case in itertools.product([model], precisions, ["LoRA", "OFT"], [0, 1])
]
"""60: every shipped model and format with both adapters and two seeds. `tests/real` has those of a pretrained model."""
SAME_BITS = ("tiny-adder", "tiny-qwen3", "tiny-llama")
"""Models whose trainer and engine pass through `policy.direct`."""
IS_EQUAL, IS_EQUAL_IN_FP32 = (
    native.kernel() is not None and find_blocks(dtype, 128, 256, 8, 0, torch.get_num_threads()) is not None
    for dtype in (torch.bfloat16, torch.float32)
)  # fmt: skip
FAMILIES = (
    "tiny-llama", "tiny-qwen3-moe", "tiny-gpt-oss", "tiny-kimi-k2", "tiny-glm4-moe", "tiny-deepseek-v4",
)  # fmt: skip


def gradients(policy: Policy, routed_TLC: torch.Tensor | None = None) -> torch.Tensor:
    """Of the log-probs of two answers to one prompt, for every trained value."""
    branches = [Branch(0, (3, 4, 5), (6, 7, 8, 9, 10)), Branch(0, (3, 4, 5), (11, 12, 13))]
    with policy.injected.selection.use(TRAINER_SLOT):
        policy.logprobs(policy.pack(branches), routed_TLC=routed_TLC)[0].sum().backward()
    masters = policy.injected.masters.parameters.values()
    return torch.cat([master.grad.flatten() for master in masters if master.grad is not None])


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_multiply_in_bf16_and_add_in_fp32(name: str) -> None:
    folder, adapter = any_builtin_folder(name, "BF16"), AdapterConfig("LoRA", (), rank=4, alpha=8.0)
    policy, exact = (load_policy(folder, adapter, compute_dtype=each) for each in (torch.bfloat16, torch.float32))
    streams, factors = set(), set()
    for layer in layers_of(policy.model):
        layer.register_forward_hook(lambda _, __, result: streams.add(result.dtype))
        for module in layer.modules():
            if isinstance(module, FrozenLinear | FrozenExpertLinear):
                module.register_forward_pre_hook(lambda _, args: factors.add(args[0].dtype))
    # The same experts: where two score almost the same, rounding would choose.
    with exact.routing.noted() if exact.routing else nullcontext(lambda: None) as chosen:
        expected, routed_TLC = gradients(exact), chosen()
    found = gradients(policy, routed_TLC)
    # The direct decoder calls no modules.
    assert (streams, factors) == (({torch.float32}, {torch.bfloat16}) if policy.direct is None else (set(), set()))
    assert cosine_similarity(found, expected, dim=0) > 0.99
    assert policy.base_digest() == exact.base_digest()


def manifest(model: str, precision: str, adapter: str, seed: int = 0, compute: str = "BF16") -> dict[str, Any]:
    asked = copy.deepcopy(small_manifest(steps=3, adapter=adapter, seed=seed))
    asked["spec"]["model"] |= {"uri": f"builtin://{model}", "precision": precision, "computePrecision": compute}
    return asked


def has_no_difference(folder: Path) -> bool:
    (measured,) = [json.loads(path.read_text()) for path in folder.glob("parity/preflight-*.json")]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [measured[part]["mean"] for part in ("engine_floor", "trainer_floor", "base", "random", "policy")]
    return {measured["limit"], *found, *(row["parity_mean"] for row in rows)} == {0.0}


@pytest.mark.parametrize(("model", "precision", "adapter", "seed"), CASES)
def test_a_healthy_run_in_bf16_passes_its_gates(
    model: str, precision: str, adapter: str, seed: int, tmp_path: Path
) -> None:
    folder, asked = tmp_path / "run", manifest(model, precision, adapter, seed)
    run(OrbitRun.model_validate(asked), out=str(folder), progress=SilentProgress())
    (measured,) = [json.loads(path.read_text()) for path in folder.glob("parity/preflight-*.json")]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    if model not in SAME_BITS or not IS_EQUAL:
        assert 0.03 <= measured["limit"] <= (0.1 if precision in ("FP8", "NVFP4", "MXFP4") else 0.05)
        return
    # Where oneDNN multiplies these shapes by one kernel, the two sides are equal to the bit (`test_same_bits`).
    assert has_no_difference(folder)


def test_a_bias_of_another_dtype_is_added() -> None:
    """As checkpoints of GPTQ and AWQ have them, in FP16."""
    weight, bias = torch.randn(96, 64).bfloat16(), torch.randn(96).half()
    group = LinearGroup([FrozenLinear(BF16Weight(weight), bias)])
    group.order(torch.bfloat16, holds=True)
    x = torch.randn(5, 64).bfloat16()
    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(group(x, torch.empty(96 * 64).bfloat16()).double(), exact, rtol=2**-7, atol=2**-5)


@pytest.mark.skipif(not IS_EQUAL_IN_FP32, reason="the library's kernels differ by the number of rows here")
@pytest.mark.parametrize(("model", "precision", "adapter"), [case[:3] for case in SHORT[:3]])
def test_a_run_in_fp32_has_no_difference(model: str, precision: str, adapter: str, tmp_path: Path) -> None:
    asked = OrbitRun.model_validate(manifest(model, precision, adapter, compute="FP32"))
    run(asked, out=str(tmp_path / "run"), progress=SilentProgress())
    assert has_no_difference(tmp_path / "run")


@pytest.mark.parametrize(("adapter", "seed"), [("LoRA", 1), ("OFT", 2)])
def test_a_healthy_run_with_rounded_activations_passes_its_gates(adapter: str, seed: int, tmp_path: Path) -> None:
    """In FP32: a sum that differs in its last bit takes another code now and then; 0.069 and 0.16 on a publish here."""
    asked = manifest("tiny-adder", "FP8", adapter, seed)
    asked["spec"]["model"] |= {"activationPrecision": "FP8", "computePrecision": "FP32"}
    asked["spec"]["training"]["steps"] = 4
    run(OrbitRun.model_validate(asked), out=str(tmp_path / "run"), progress=SilentProgress())


@pytest.mark.parametrize("compute", ["BF16", "FP32"])
@pytest.mark.parametrize("place", ["weight", "page", "adapter"])
def test_one_changed_bit_is_seen_at_once(
    place: str, compute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (IS_EQUAL if compute == "BF16" else IS_EQUAL_IN_FP32):
        pytest.skip("the library's kernels differ by the number of rows here")
    step, planted = DecodingBatch.step, []

    def faulty(batch: Any, *told: Any) -> Any:
        ended, policy = step(batch, *told), batch._policy
        shared, layer = policy.direct.shared()[0][1], next(iter(policy.injected.layers.values()))
        # While it samples: it scores with something that it tells.
        if not planted and not told and "policy-v1" in layer.slots and len(batch):
            planted.append(place)
            page = batch._cache.block[0, 0, 0, 0]
            changed = {"weight": shared.views()[0], "page": page, "adapter": layer.slots["policy-v1"].lora_B}[place]
            # Its exponent, so that few tokens show it. B may lie transposed.
            changed = changed if changed.is_contiguous() else changed.t()
            changed.view(torch.int16)[0, changed.itemsize // 2 - 1] ^= 1 << (10 if place == "adapter" else 9)
            if compute == "BF16":
                shared.order()
        return ended

    monkeypatch.setattr(DecodingBatch, "step", faulty)
    asked = OrbitRun.model_validate(manifest("tiny-adder", "BF16", "LoRA", compute=compute))
    with pytest.raises(GateError, match=r"limit 0(;|\n|$)"):
        run(asked, out=str(tmp_path / "run"), progress=SilentProgress())
    assert planted == [place]
    rows = [json.loads(path.read_text()) for path in (tmp_path / "run").glob("metrics/step-*.json")]
    assert [row["step"] for row in rows] == [1]


def test_a_resumed_run_computes_as_its_first_start_did(tmp_path: Path) -> None:
    asked = manifest("tiny-adder", "INT4", "LoRA")
    run(OrbitRun.model_validate(asked), out=str(tmp_path / "run"), progress=SilentProgress())
    del asked["spec"]["model"]["computePrecision"]
    asked["spec"]["training"]["steps"] = 4
    run(OrbitRun.model_validate(asked), out=str(tmp_path / "run"), progress=SilentProgress())
    kept = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (kept["compute_dtype"], kept["resolved"]["spec"]["model"]["computePrecision"]) == ("bfloat16", "BF16")
