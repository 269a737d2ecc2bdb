"""Chunked and native attention against plain attention of every sequence by itself in fp64, and what it never makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from orbit_runtime.adapters.layer import TRAINER_SLOT
from orbit_runtime.policy import load_policy, native
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


def fused(batch: PackedBatch, inputs: list[Tensor], look: AttentionSettings) -> Tensor:
    """By torch's fused kernel, over gathered rows."""
    return (
        PackedPlan(batch, "SDPA", is_alone=False).attend_tokens(0, *inputs, look).unflatten(1, (len(inputs[0][0]), -1))
    )


def natively(batch: PackedBatch, inputs: list[Tensor], look: AttentionSettings) -> Tensor:
    if native.kernel() is None:
        pytest.skip("no C compiler: Orbit's own kernel cannot be made")
    return PackedPlan(batch, "SDPA").attend_tokens(0, *inputs, look).unflatten(1, (len(inputs[0][0]), -1))


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
    dense = with_gradients(fused(batch, inputs, look), inputs)
    floor = [float((x - y).abs().max()) for x, y in zip(dense, exact, strict=True)]
    outs = [attend_chunked(*inputs, batch.rows, look, longest_block=longest) for longest in (1, 8, 1024)]
    for out in (*outs, natively(batch, inputs, look)):
        for found, wanted, near in zip(with_gradients(out, inputs), exact, floor, strict=True):
            assert float((found - wanted).abs().max()) <= 2.0 * near + 4e-6 * max(1.0, float(wanted.abs().max()))


def test_bf16_is_as_near_to_fp64_as_the_fused_kernel() -> None:
    batch = build_packed(BRANCHES, CPU)
    inputs = random_inputs(len(batch.token_ids_T), SIZES["grouped heads"], torch.bfloat16)
    look = AttentionSettings(0.3)
    exact = with_gradients(expected(batch, inputs, look), inputs)
    dense = with_gradients(fused(batch, inputs, look), inputs)
    for out in (attend_chunked(*inputs, batch.rows, look, longest_block=8), natively(batch, inputs, look)):
        assert out.dtype is torch.bfloat16
        for found, other, wanted in zip(with_gradients(out, inputs), dense, exact, strict=True):
            assert (found - wanted).double().square().mean() <= 1.5 * (other - wanted).double().square().mean()


@pytest.mark.parametrize("case", [case for case in CASES if case.family != "deepseek_v4"], ids=str)
def test_every_family_has_the_log_probs_and_gradients_of_the_fused_kernel(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, _ = make_family(tmp_path, case.family, case.layout)
    policy = load_policy(packed, adapter_of(case))
    found = {}
    for kernel in ("Native", "SDPA", "Eager", "Chunked"):
        other = policy if kernel == "Native" else replace(policy, kernel=kernel)
        with policy.injected.selection.use(TRAINER_SLOT):
            logprobs, _ = other.logprobs(other.pack(BRANCHES))
        found[kernel] = [logprobs.detach(), *torch.autograd.grad(logprobs.sum(), policy.injected.parameters())]
        monkeypatch.setattr(native, "kernel", lambda: None)
    for dense, eager, *others in zip(*map(found.__getitem__, ("SDPA", "Eager", "Chunked", "Native")), strict=True):
        floor = float((eager - dense).abs().max())
        for other in others:
            assert float((other - dense).abs().max()) <= max(4.0 * floor, 1e-5 * float(dense.abs().max()))


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
    for kernel in ("SDPA", "Chunked", "Native"):
        with Largest() as largest:
            batch = build_packed(branches, CPU)
            inputs = random_inputs(len(batch.token_ids_T), (2, 1, 8, 8))
            look = AttentionSettings(0.3)
            if kernel == "Chunked":
                out = attend_chunked(*inputs, batch.rows, look, longest_block=block)
            else:
                out = fused(batch, inputs, look) if kernel == "SDPA" else natively(batch, inputs, look)
            out.sum().backward()
        found[kernel] = largest.elements
    assert found["SDPA"] >= 2 * (answer - 1) * (prompt + answer - 1)
    assert max(found["Chunked"], found["Native"]) <= max(2 * 8 * len(batch.token_ids_T), 2 * block * block)


def test_a_bucket_without_prefixes_is_given_no_mask_and_has_the_same_bits() -> None:
    """All rows of a bucket with a prefix of their own; the mask would say what the kernel knows."""
    batch = build_packed([Branch(n, tokens_of(length, n), [1]) for n, length in enumerate((14, 12, 15, 40))], CPU)
    inputs = random_inputs(len(batch.token_ids_T), SIZES["grouped heads"])
    masked = replace(batch)
    vars(masked)["buckets"] = tuple(replace(bucket, starts_later=True) for bucket in batch.buckets)
    found = [with_gradients(fused(each, inputs, AttentionSettings(0.3)), inputs) for each in (batch, masked)]
    assert not any(bucket.starts_later for bucket in batch.buckets)
    assert all(map(torch.equal, *found))


def test_two_passes_give_the_same_bits() -> None:
    batch = build_packed(BRANCHES, CPU)
    inputs, look = random_inputs(len(batch.token_ids_T), SIZES["MLA"]), AttentionSettings(0.3)
    for attend in (
        lambda: attend_chunked(*inputs, batch.rows, look, longest_block=8),
        lambda: natively(batch, inputs, look),
    ):
        assert all(map(torch.equal, *(with_gradients(attend(), inputs) for _ in range(2))))


@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
def test_what_is_no_number_reaches_every_query_that_sees_it(place: int) -> None:
    batch = build_packed([Branch(0, tokens_of(70, 1), tokens_of(9, 2)), Branch(1, tokens_of(5, 3), [1])], CPU)
    inputs = [each.detach() for each in random_inputs(len(batch.token_ids_T), SIZES["grouped heads"])]
    # A weight of 0 times a value that is no number is none either: 64 and 65 are multiplied in the same block.
    inputs[place][66] = torch.nan
    out_THD = natively(batch, inputs, AttentionSettings(0.3))
    lost = {token for token, each in enumerate(out_THD) if bool(each.isnan().all())}
    assert lost == ({66, *range(67, 78)} if place else {66}) | ({64, 65} if place == 2 else set()), lost
    assert all(bool(each.isfinite().all()) for token, each in enumerate(out_THD) if token not in lost)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("extra", ["", "window", "sinks", "cap"])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_query_alone_has_the_bits_that_it_has_among_all(sizes: str, extra: str, dtype: torch.dtype) -> None:
    """Of sequences up to 200 tokens, more than three blocks of keys, over a cache as decode steps read it."""
    batch = build_packed([*BRANCHES, Branch(2, tokens_of(130, 8), tokens_of(70, 9))], CPU)
    inputs = random_inputs(len(batch.token_ids_T), SIZES[sizes], dtype)
    sinks = torch.linspace(-1.0, 2.0, SIZES[sizes][0]) if extra == "sinks" else None
    look = AttentionSettings(0.3, 70 if extra == "window" else None, sinks, 1.5 if extra == "cap" else None)
    q_THD, k_TKD, v_TKD = (each.detach() for each in inputs)
    found = natively(batch, inputs, look).detach()
    for keys, own in sequences(batch):
        # Behind the cached keys lies what an earlier request left there.
        kept = [torch.full((2, each.shape[1], 210, each.shape[2]), 9.0, dtype=dtype) for each in (k_TKD, v_TKD)]
        for cached, each in zip(kept, (k_TKD, v_TKD), strict=True):
            cached[1, :, : len(keys)] = each[keys].transpose(0, 1)
        for place, token in enumerate(own):
            position = len(keys) - len(own) + place
            table = native.decode_table(np.array([0, position]), k_TKD.shape[1], 210)
            rows = (each[0].transpose(0, 1) for each in kept)
            # Its neighbour has another position and other values.
            pair = native.attend(q_THD[[0, token]], *rows, table, look, None)
            assert torch.equal(pair[1], found[token]), (token, position)
