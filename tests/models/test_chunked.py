"""Chunked attention against plain attention of every sequence by itself in fp64, and what it never makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from orbit_runtime.adapters.layer import TRAINER_SLOT
from orbit_runtime.policy import load_policy
from orbit_runtime.policy.attention import AttentionSettings
from orbit_runtime.policy.chunked import attend_chunked
from orbit_runtime.policy.packed import Branch, PackedBatch, PackedPlan, build_packed
from tests.integration.tiny_families import make_family
from tests.models.family_matrix import Case, adapter_of, tokens_of
from tests.models.test_determinism import CASES

CPU = torch.device("cpu")
SIZES = {"grouped heads": (4, 2, 16, 16), "MLA": (4, 4, 24, 16), "one key head": (8, 1, 32, 32)}
BRANCHES = [
    Branch(0, tokens_of(9, 1), tokens_of(12, 2)),
    Branch(0, tokens_of(9, 1), tokens_of(5, 3)),
    Branch(1, tokens_of(30, 4), tokens_of(40, 5)),
    # Not beside the others of its prefix, and one that is a target only.
    Branch(0, tokens_of(9, 1), tokens_of(22, 6)),
    Branch(1, tokens_of(30, 4), tokens_of(1, 7)),
]


def sequences(batch: PackedBatch) -> Iterator[tuple[list[int], list[int]]]:
    """Packed indexes of every row's keys, in their order, and of those that are its own."""
    for row in batch.rows:
        own = list(range(row.first, row.first + row.length))
        yield [*range(row.prefix_first, row.prefix_first + row.prefix_length), *own], own


def expected(batch: PackedBatch, inputs: list[Tensor], look: AttentionSettings) -> Tensor:
    """fp64, sequence by sequence, with every score written out."""
    q_THD, k_TKD, v_TKD = (x.double() for x in inputs)
    heads = q_THD.shape[1]
    k_THD, v_THD = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k_TKD, v_TKD))
    out: dict[int, Tensor] = {}
    for keys, own in sequences(batch):
        scores = torch.einsum("qhd,khd->hqk", q_THD[own], k_THD[keys]) * look.scale
        scores = scores if look.cap is None else look.cap * torch.tanh(scores / look.cap)
        place = torch.arange(len(keys) - len(own), len(keys))[:, None]
        far = torch.arange(len(keys)) <= (place - look.window if look.window is not None else -1)
        scores = scores.masked_fill((torch.arange(len(keys)) > place) | far, -torch.inf)
        weights = scores.exp()
        total = weights.sum(-1, keepdim=True)
        if look.sinks_H is not None:
            total = total + look.sinks_H.double().exp()[:, None, None]
        values = torch.einsum("hqk,khd->qhd", weights / total, v_THD[keys])
        out |= dict(zip(own, values, strict=True))
    return torch.stack([out[token] for token in range(len(q_THD))])


def random_inputs(tokens: int, sizes: tuple[int, int, int, int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    heads, kv_heads, size, value_size = sizes
    generator = torch.Generator().manual_seed(5)
    shapes = ((tokens, heads, size), (tokens, kv_heads, size), (tokens, kv_heads, value_size))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def with_gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(6))
    return [out.detach(), *torch.autograd.grad((out * slope.to(out.dtype)).sum(), inputs)]


@pytest.mark.parametrize("extra", ["", "sinks", "cap"])
@pytest.mark.parametrize("window", [None, 1, 6, 100])
@pytest.mark.parametrize("sizes", SIZES)
def test_values_and_gradients_are_as_near_to_fp64_as_the_other_kernels_are(
    sizes: str, window: int | None, extra: str
) -> None:
    batch = build_packed(BRANCHES, CPU)
    inputs = random_inputs(len(batch.token_ids_T), SIZES[sizes])
    sinks = torch.linspace(-1.0, 2.0, SIZES[sizes][0]) if extra == "sinks" else None
    look = AttentionSettings(0.3, window, sinks, 1.5 if extra == "cap" else None)
    exact = with_gradients(expected(batch, inputs, look), inputs)
    dense = PackedPlan(batch, "SDPA").attend_tokens(0, *inputs, look)
    floor = [
        float((x - y).abs().max()) for x, y in zip(with_gradients(dense.view_as(exact[0]), inputs), exact, strict=True)
    ]
    for longest in (1, 8, 1024):
        chunked = attend_chunked(*inputs, batch.rows, look, longest_block=longest)
        for found, wanted, near in zip(with_gradients(chunked, inputs), exact, floor, strict=True):
            assert float((found - wanted).abs().max()) <= 2.0 * near + 4e-6 * max(1.0, float(wanted.abs().max()))


def test_bf16_is_as_near_to_fp64_as_the_fused_kernel() -> None:
    batch = build_packed(BRANCHES, CPU)
    inputs = random_inputs(len(batch.token_ids_T), SIZES["grouped heads"], torch.bfloat16)
    look = AttentionSettings(0.3)
    exact = with_gradients(expected(batch, inputs, look), inputs)
    dense = PackedPlan(batch, "SDPA").attend_tokens(0, *inputs, look).view_as(exact[0])
    chunked = attend_chunked(*inputs, batch.rows, look, longest_block=8)
    assert chunked.dtype is torch.bfloat16
    for found, other, wanted in zip(with_gradients(chunked, inputs), with_gradients(dense, inputs), exact, strict=True):
        assert (found - wanted).double().square().mean() <= 1.5 * (other - wanted).double().square().mean()


@pytest.mark.parametrize("case", [case for case in CASES if case.family != "deepseek_v4"], ids=str)
def test_every_family_has_the_log_probs_and_gradients_of_the_fused_kernel(case: Case, tmp_path: Path) -> None:
    packed, _ = make_family(tmp_path, case.family, case.layout)
    policy = load_policy(packed, adapter_of(case))
    found = {}
    for kernel in ("SDPA", "Eager", "Chunked"):
        other = replace(policy, kernel=kernel)
        with policy.injected.selection.use(TRAINER_SLOT):
            logprobs, _ = other.logprobs(other.pack(BRANCHES))
        found[kernel] = [logprobs.detach(), *torch.autograd.grad(logprobs.sum(), policy.injected.parameters())]
    for chunked, dense, eager in zip(found["Chunked"], found["SDPA"], found["Eager"], strict=True):
        floor = float((eager - dense).abs().max())
        assert float((chunked - dense).abs().max()) <= max(4.0 * floor, 1e-5 * float(dense.abs().max()))


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.numel())
        return result


def test_nothing_grows_with_the_square_of_the_tokens() -> None:
    prompt, answer, block = 100, 250, 32
    branches = [Branch(0, tokens_of(prompt, 1), tokens_of(answer, seed)) for seed in (2, 3)]
    found = {}
    for kernel in ("SDPA", "Chunked"):
        with Largest() as largest:
            batch = build_packed(branches, CPU)
            inputs = random_inputs(len(batch.token_ids_T), (2, 1, 8, 8))
            if kernel == "SDPA":
                out = PackedPlan(batch, kernel).attend_tokens(0, *inputs, AttentionSettings(0.3))
            else:
                out = attend_chunked(*inputs, batch.rows, AttentionSettings(0.3), longest_block=block)
            out.sum().backward()
        found[kernel] = largest.elements
    assert found["SDPA"] >= 2 * (answer - 1) * (prompt + answer - 1)
    assert found["Chunked"] <= max(2 * 8 * len(batch.token_ids_T), 2 * block * block)


def test_a_bucket_without_prefixes_is_given_no_mask_and_has_the_same_bits() -> None:
    """All rows of a bucket with a prefix of their own; the mask would say what the kernel knows."""
    batch = build_packed([Branch(n, tokens_of(length, n), [1]) for n, length in enumerate((14, 12, 15, 40))], CPU)
    inputs = random_inputs(len(batch.token_ids_T), SIZES["grouped heads"])
    masked = replace(batch, buckets=tuple(replace(bucket, starts_later=True) for bucket in batch.buckets))
    found = [
        with_gradients(PackedPlan(each, "SDPA").attend_tokens(0, *inputs, AttentionSettings(0.3)), inputs)
        for each in (batch, masked)
    ]
    assert not any(bucket.starts_later for bucket in batch.buckets)
    assert all(map(torch.equal, *found))


def test_two_passes_give_the_same_bits() -> None:
    batch = build_packed(BRANCHES, CPU)
    inputs = random_inputs(len(batch.token_ids_T), SIZES["MLA"])
    found = [
        with_gradients(attend_chunked(*inputs, batch.rows, AttentionSettings(0.3), longest_block=8), inputs)
        for _ in range(2)
    ]
    assert all(map(torch.equal, *found))
