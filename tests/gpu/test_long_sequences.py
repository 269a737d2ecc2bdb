"""Chunked attention and layers computed again, on a CUDA device. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.layer import TRAINER_SLOT, Dropout
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.policy import load_policy
from orbit_runtime.policy.attention import AttentionSettings, Kernel
from orbit_runtime.policy.packed import Branch, PackedPlan, build_packed
from tests.integration.tiny_models import TARGETS
from tests.models.family_matrix import tokens_of
from tests.models.test_chunked import expected, random_inputs, with_gradients

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("sizes", [(8, 2, 64, 64), (4, 4, 192, 128)])
def test_chunks_are_as_near_to_fp64_as_the_fused_kernel(sizes: tuple[int, int, int, int], window: int | None) -> None:
    branches = [Branch(0, tokens_of(300, 1), tokens_of(count, count)) for count in (1500, 900)]
    batch = build_packed(branches, torch.device("cuda"))
    inputs = random_inputs(len(batch.token_ids_T), sizes, torch.bfloat16)
    look = AttentionSettings(0.1, window)
    exact = with_gradients(expected(batch, inputs, look), inputs)
    moved = [each.detach().cuda().requires_grad_() for each in inputs]

    def found(kernel: Kernel) -> list[torch.Tensor]:
        out = PackedPlan(batch, kernel).attend_tokens(0, *moved, look).view(exact[0].shape)  # type: ignore[call-arg]
        slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(6)).to(out)
        return [out.detach(), *torch.autograd.grad((out * slope).sum(), moved)]

    for chunked, fused, wanted in zip(found("Chunked"), found("SDPA"), exact, strict=True):
        error, floor = ((each.cpu().double() - wanted).square().mean() for each in (chunked, fused))
        assert error <= 1.5 * floor


def test_memory_of_a_long_row_grows_with_its_tokens() -> None:
    """32,768 tokens of 16 heads: queries, keys, values, their gradients and a few blocks, where a mask takes 1 GiB."""
    batch = build_packed([Branch(0, [1] * 4096, [2] * 28673)], torch.device("cuda"))
    inputs = [each.detach().cuda().requires_grad_() for each in random_inputs(32768, (16, 4, 64, 64), torch.bfloat16)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    PackedPlan(batch, "Chunked").attend_tokens(0, *inputs, AttentionSettings(0.1)).sum().backward()  # type: ignore[call-arg]
    assert torch.cuda.max_memory_allocated() - before < 3 << 30


@pytest.mark.parametrize("recompute", ["Selective", "PerLayer"])
def test_gradients_are_those_without_recomputation(recompute: str) -> None:
    config = AdapterConfig(type="LoRA", targets=TARGETS, rank=4, alpha=8.0, dropout=0.2)
    policy = load_policy(builtin_folder("tiny-adder", "INT4"), config, device="cuda", compute_dtype=torch.bfloat16)
    batch = policy.pack([Branch(0, tokens_of(9, 1), tokens_of(40, 2)), Branch(0, tokens_of(9, 1), tokens_of(17, 3))])
    found = []
    for how in ("None", recompute):
        policy.recompute(how)  # type: ignore[arg-type]
        with policy.injected.selection.use(TRAINER_SLOT, dropout=Dropout(3)):
            logprobs, _ = policy.logprobs(batch)
        found.append([logprobs.detach(), *torch.autograd.grad(logprobs.sum(), policy.injected.parameters())])
    assert all(map(torch.equal, *found))
