"""Log-probs of given tokens and entropies, one chunk of rows at a time.

Belongs here: the output projection and the log-softmax, so that no `[tokens, vocabulary]` fp32 tensor outlives its
chunk. Does not belong here: hidden states (`model`), how settings change logits, losses (`algorithms`).

Logits are rounded to fp32, never to BF16. A logit of 20 is a multiple of 1/8 in BF16, so that policy and sampler, whose
hidden states differ by a last bit, get log-probs that differ by far more (MiniMax-M1, arXiv:2506.13585). SGLang does
the same with `--enable-fp32-lm-head`, which servers of a BF16 run are started with.

Legend: `R` targets, `N` hidden size, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import CDLL, c_float, c_int, c_void_p
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orbit_runtime.algorithms.distribution import add_bias, penalise, penalty_slope, truncate
from orbit_runtime.policy import native
from orbit_runtime.policy.preceding_tokens import PrecedingTokens
from orbit_runtime.quant.bf16 import BF16Weight
from orbit_runtime.quant.kernels import panels
from orbit_runtime.quant.linear import FrozenLinear, ordered_linear
from orbit_runtime.types import Sampling


def logits_of(head: nn.Module, hidden_RN: Tensor) -> Tensor:
    """Logits `[R, V]` of BF16 or fp32 hidden states: fp32, except that a packed head keeps the dtype of BF16 ones."""
    weight_VN, product = _plain_weight(head), head
    if hidden_RN.dtype == torch.bfloat16 and weight_VN is not None:
        ordered_VN = getattr(head, "ordered", None)
        # oneDNN's order, of an odd width, has no product whose result is fp32.
        in_panels = None if ordered_VN is None or ordered_VN.is_mkldnn else ordered_VN
        product = partial(_Logits.apply, weight_VN, in_panels)
    missing = 0 if hidden_RN.is_cuda else max(0, FEWEST_ROWS[torch.float32] - len(hidden_RN))
    return product(F.pad(hidden_RN, (0, 0, 0, missing)))[: len(hidden_RN)] if missing else product(hidden_RN)


def _plain_weight(head: nn.Module) -> Tensor | None:
    """The head's BF16 matrix; None if it has anything else."""
    if getattr(head, "bias", None) is not None:
        return None
    if type(head) is FrozenLinear and head.rounding is None and isinstance(packed := head.packed, BF16Weight):
        return packed.qdata
    return head.weight if type(head) is nn.Linear and head.weight.dtype == torch.bfloat16 else None


@cache
def fp32_product() -> Callable[[Tensor, Tensor, Tensor], None] | None:
    """`out = x @ W.T` of contiguous BF16 x and W, kept in fp32: a function of the MKL inside torch, for which torch has
    no operation on a CPU. A row has the same bits for all numbers of rows but one. None where the processor has no AMX,
    or torch no MKL."""
    found = torch.cpu._is_amx_tile_supported() and getattr(CDLL("libtorch_cpu.so"), "cblas_gemm_bf16bf16f32", None)
    if not found:
        return None
    found.argtypes, found.restype = [*[c_int] * 6, c_float, *[c_void_p, c_int] * 2, c_float, c_void_p, c_int], None

    def product(x: Tensor, w: Tensor, out: Tensor) -> None:
        (rows, size), columns = x.shape, len(w)
        orders = 101, 111, 112  # stored by rows; x as it is, W transposed
        found(*orders, rows, columns, size, 1.0, x.data_ptr(), size, w.data_ptr(), size, 0.0, out.data_ptr(), columns)

    tried, result = torch.linspace(-1, 1, 5 * 64).bfloat16().view(5, 64), torch.full((2, 3), torch.nan)
    product(tried[:2], tried[2:], result)
    # Another build of torch may hold one that reads its arguments otherwise.
    return product if torch.allclose(result, tried[:2].float() @ tried[2:].float().T, atol=1e-4) else None


class _Logits(torch.autograd.Function):
    """BF16 times BF16, kept as summed in fp32. Gradients are rounded to BF16 before they are multiplied."""

    @staticmethod
    def forward(ctx: Any, weight_VN: Tensor, in_panels: Tensor | None, hidden_RN: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_RN, weight_VN)
        if hidden_RN.is_cuda:
            return torch.mm(hidden_RN, weight_VN.T, out_dtype=torch.float32)
        product = fp32_product()
        if product is not None:
            logits_RV = hidden_RN.new_empty(len(hidden_RN), len(weight_VN), dtype=torch.float32)
            product(hidden_RN.contiguous(), weight_VN.contiguous(), logits_RV)
            return logits_RV
        if in_panels is not None:
            return panels.multiply(hidden_RN, in_panels, columns=len(weight_VN), dtype=torch.float32)
        # BF16 factors in fp32 have the same products. MKL takes some processors twice as long as oneDNN.
        wide = hidden_RN.float()
        multiply = ordered_linear if torch.backends.mkldnn.is_available() else F.linear
        return torch.cat([multiply(wide, part.float()) for part in weight_VN.split(WIDENED_ROWS)], 1)

    @staticmethod
    def backward(ctx: Any, grad_RV: Tensor) -> tuple[Tensor | None, ...]:
        hidden_RN, weight_VN = ctx.saved_tensors
        rounded = grad_RV.to(weight_VN.dtype)
        turn = panels.multiply_turned if panels.can_multiply(rounded, len(weight_VN)) else torch.mm
        of_hidden = turn(rounded, weight_VN) if ctx.needs_input_grad[2] else None
        of_weight = rounded.T @ hidden_RN if ctx.needs_input_grad[0] else None
        return of_weight, None, of_hidden


FEWEST_ROWS = {torch.bfloat16: 48, torch.float32: 16}
"""Fewest rows of a product on a CPU whose rows are to have the same bits whatever their number."""
TRIED_ROWS = (3, 7, 12, 24, 40, 48, 57, 64, 100, 128, 171, 192, 256, 768, 1000, 2048, 4096)
"""Numbers of rows of the products that are tried. Of one kernel's, all rows have the same bits; of another's, some
results in a thousand differ."""
COMPARED_ROWS = 768
"""Rows that are compared, at least, however few a product has."""
WIDENED_ROWS = 4096
"""Rows of the head's matrix that are widened at a time: they stay in the cache."""


def twice(x: Tensor, dim: int, sign: float = 1.0) -> Tensor:
    """x with the second half of every 16 of its numbers along `dim` as the first, times `sign`. A product that sums
    over numbers with sign 1 and others with -1 leaves its rounding alone: an order of sums that would change one BF16
    result in a hundred thousand changes many of these."""
    if x.shape[dim] % 16:
        return x
    halves = x.unflatten(dim, (-1, 2, 8))
    halves.select(dim + 1, 1).copy_(halves.select(dim + 1, 0) * sign)
    return halves.flatten(dim, dim + 2)


def rows_are_equal(
    product: Callable[[Tensor], Tensor], in_features: int, dtype: torch.dtype, *ranges: tuple[int, int]
) -> bool:
    """Whether a product gives rows the same bits for all numbers of rows in these ranges, found by trying."""
    counts = {*ranges[0], *(count for count in TRIED_ROWS if any(low <= count <= high for low, high in ranges))}
    rows = max(COMPARED_ROWS, *counts)
    x_TK = twice(torch.randn(rows, in_features, generator=torch.Generator().manual_seed(0)), 1).to(dtype)

    def products(count: int) -> Tensor:
        tried = x_TK[: max(COMPARED_ROWS, count)].split(count)
        return torch.cat([product(part) for part in tried if len(part) == count])

    with torch.no_grad():
        expected = products(max(counts))
        return all(torch.equal(each[: len(expected)], expected[: len(each)]) for each in map(products, counts))


def head_gives_same_bits(head: nn.Module, dtype: torch.dtype) -> bool:
    """Whether `logits_of` hidden states of this dtype on a CPU have the same bits whatever their number."""
    weight_VN = _plain_weight(head)
    if dtype is torch.float32:
        most = max(64, min(1024, CHUNK_ELEMENTS // head.out_features))
        return rows_are_equal(head, head.in_features, dtype, (FEWEST_ROWS[dtype], most))
    if weight_VN is None:
        return False
    parts = weight_VN.split(WIDENED_ROWS)
    tried = [FrozenLinear(BF16Weight(part)) for part in {parts[0], parts[-1]}]
    if getattr(head, "ordered", None) is not None:
        for each in tried:
            each.order()
    return all(
        rows_are_equal(partial(logits_of, each), each.in_features, dtype, (FEWEST_ROWS[torch.float32], COMPARED_ROWS))
        for each in tried
    )


CHUNK_ELEMENTS = 1 << 24
"""Rows per chunk are chosen so that one fp32 `[rows, V]` tensor has at most this many elements (64 MiB)."""
SAVED_CHUNK_ELEMENTS = 6 << 20
"""The same where a chunk's gradient is computed with its log-probs: logits that a processor's last cache may hold."""
UNSHAPED = Sampling()
"""The model's own distribution."""

Head = Callable[[torch.Tensor], torch.Tensor]


def _bias(logits_RV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """fp32 logits with the bias added."""
    logits = logits_RV.float()
    if not sampling.logit_bias:
        return logits
    token_ids, biases = zip(*sampling.logit_bias, strict=True)
    return add_bias(
        logits,
        torch.tensor(token_ids, dtype=torch.long, device=logits.device),
        torch.tensor(biases, dtype=torch.float32, device=logits.device),
    )


def _cut(biased_RV: torch.Tensor, targets_R: torch.Tensor, sampling: Sampling, seen_RV: Any) -> torch.Tensor:
    """fp32 logits of the distribution from which tokens are drawn: penalty, temperature, truncation."""
    logits = biased_RV if seen_RV is None else penalise(biased_RV, seen_RV, sampling.repetition_penalty)
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    return truncate(
        logits,
        sampling.top_k or None,
        sampling.top_p if sampling.top_p < 1.0 else None,
        sampling.min_p or None,
        targets_R,
    )


def _entropy(logprobs_RV: torch.Tensor) -> torch.Tensor:
    """A token that is cut off has probability 0 and log-prob -inf: it adds nothing."""
    return -logprobs_RV.exp().mul_(logprobs_RV.clamp(min=torch.finfo(torch.float32).min)).sum(-1)


def _entropy_slope(cut_RV: torch.Tensor) -> torch.Tensor:
    """d entropy / d logits = -p (log p + entropy)"""
    logprobs = torch.log_softmax(cut_RV, dim=-1)
    entropy_R1 = _entropy(logprobs)[:, None]
    return logprobs.clamp(min=torch.finfo(torch.float32).min).add_(entropy_R1).mul_(logprobs.exp()).neg_()


def logprobs_of(logits_RV: Tensor, targets_R: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of targets, and entropies, of fp32 logits: of a token with logit -inf, a probability of 0."""
    if native.can_step(logits_RV, torch.float32):
        return native.scored(logits_RV, targets_R, entropies=True)
    logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
    return logprobs_RV.gather(-1, targets_R[:, None])[:, 0], _entropy(logprobs_RV)


# A chunk's tensors are each in a function of their own: they are gone before the next chunk's are made.


def _score(
    logits_RV: torch.Tensor, targets_R: torch.Tensor, part: slice, sampling: Sampling, seen: PrecedingTokens | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A chunk's log-probs and entropies; `part` says which of all targets it holds."""
    biased = _bias(logits_RV, sampling)
    seen_RV = seen.mask(part, biased.shape[-1]) if seen else None
    cut_RV = _cut(biased, targets_R, sampling, seen_RV)
    del biased
    return logprobs_of(cut_RV, targets_R)


def _slope(
    logits_RV: torch.Tensor,
    targets_R: torch.Tensor,
    grads_R: tuple[torch.Tensor | None, ...],
    part: slice,
    sampling: Sampling,
    seen: PrecedingTokens | None,
) -> torch.Tensor:
    """Gradient with respect to a chunk's logits, in their dtype, given those of its log-probs and entropies."""
    biased = _bias(logits_RV, sampling)
    seen_RV = seen.mask(part, biased.shape[-1]) if seen else None
    cut = _cut(biased, targets_R, sampling, seen_RV)
    grad_R, entropy_grad_R = grads_R
    if grad_R is None:
        slope = torch.zeros_like(cut)
    else:
        # d logp(y) / d logits = (onehot(y) - softmax) / T, times the penalty's own slope
        slope = torch.softmax(cut, dim=-1).neg_()
        slope[torch.arange(len(slope), device=slope.device), targets_R] += 1.0
        slope.mul_(grad_R[:, None] / sampling.temperature)
    if entropy_grad_R is not None:
        slope += _entropy_slope(cut).mul_(entropy_grad_R[:, None] / sampling.temperature)
    if seen_RV is not None:
        slope.mul_(penalty_slope(biased, seen_RV, sampling.repetition_penalty))
    return slope.to(logits_RV.dtype)


def _saves_slopes(hidden_RN: Tensor, sampling: Sampling) -> bool:
    # Ranks on a CPU keep what they keep on a GPU, as planned.
    is_rank = torch.distributed.is_available() and torch.distributed.is_initialized()
    cuts = sampling.logit_bias or sampling.top_k or sampling.min_p or sampling.top_p < 1.0
    scales = sampling.temperature != 1.0 or sampling.repetition_penalty != 1.0
    fits = hidden_RN.dtype == torch.bfloat16 and native.can_step(hidden_RN, torch.float32)
    return fits and not (is_rank or cuts or scales)


def _score_with_slope(hidden_RN: Tensor, targets_R: Tensor, head: Head) -> tuple[Tensor, Tensor, Tensor]:
    """`_score`, and the gradient `[R, N]` of each log-prob with respect to its hidden state."""
    with torch.enable_grad():
        hidden = hidden_RN.detach().requires_grad_(True)
        logits_RV = head(hidden)
    # A slope takes its logits' place. Those of a packed head are BF16.
    slope_RV = logits_RV.detach().float()
    logprobs_R, entropies_R = native.scored(slope_RV, targets_R, entropies=True, slopes=True)
    (negative_RN,) = torch.autograd.grad(logits_RV, hidden, slope_RV.to(logits_RV.dtype))
    return logprobs_R, entropies_R, negative_RN.neg_()


class _TokenLogProbs(torch.autograd.Function):
    """Saves hidden states and targets; backward recomputes each chunk's logits. For BF16 states on a CPU, under the
    model's own distribution, it saves each log-prob's gradient instead, so that logits are computed once.

    If the head is trained, its weights are passed so that they get a gradient; `head` multiplies by the same weights.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RN: torch.Tensor,
        targets_R: torch.Tensor,
        head: Head,
        sampling: Sampling,
        seen: PrecedingTokens | None,
        rows: int,
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropies, slopes = [], [], []
        saves = ctx.needs_input_grad[0] and _saves_slopes(hidden_RN, sampling) and not weights
        for start in range(0, len(targets_R), rows):
            part = slice(start, start + rows)
            if saves:
                *scored, slope_RN = _score_with_slope(hidden_RN[part], targets_R[part], head)
                slopes.append(slope_RN)
            else:
                scored = list(_score(head(hidden_RN[part]), targets_R[part], part, sampling, seen))
            logprobs.append(scored[0])
            entropies.append(scored[1])
        ctx.save_for_backward(hidden_RN, targets_R, torch.cat(slopes) if slopes else None)
        # An output that no loss reads has no gradient, rather than one of zeros.
        ctx.set_materialize_grads(False)
        ctx.settings = (head, sampling, seen, rows, weights)
        return _joined(logprobs, hidden_RN), _joined(entropies, hidden_RN)

    @staticmethod
    def backward(
        ctx: Any, grad_R: torch.Tensor | None, entropy_grad_R: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_RN, targets_R, slope_RN = ctx.saved_tensors
        head, sampling, seen, rows, weights = ctx.settings
        if slope_RN is not None and entropy_grad_R is None and grad_R is not None:
            return (slope_RN * grad_R[:, None]).to(hidden_RN.dtype), None, None, None, None, None
        grad_hidden = torch.empty_like(hidden_RN)
        grad_weights = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
        for start in range(0, len(targets_R), rows):
            part = slice(start, start + rows)
            with torch.enable_grad():
                hidden = hidden_RN[part].detach().requires_grad_(True)
                logits = head(hidden)
            grads = tuple(None if each is None else each[part] for each in (grad_R, entropy_grad_R))
            slope = _slope(logits.detach(), targets_R[part], grads, part, sampling, seen)
            grad_hidden[part], *found = torch.autograd.grad(logits, (hidden, *weights), slope)
            del logits, slope  # or the next chunk would stand beside them
            for total, each in zip(grad_weights, found, strict=True):
                total += each
        summed = (total.to(weight.dtype) for total, weight in zip(grad_weights, weights, strict=True))
        return grad_hidden, None, None, None, None, None, *summed


def token_scores(
    hidden_RN: torch.Tensor,
    targets_R: torch.Tensor,
    head: Head,
    *,
    vocabulary: int,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(logprobs [R] fp32, top [R] int64)`: the log-probs of `targets`, bit-identical to `token_logprobs`, and the most
    probable token at each target. Under the model's own distribution; without gradients."""
    rows = max(1, chunk_elements // vocabulary)
    logprobs, top = [], []
    with torch.no_grad():
        for start in range(0, len(targets_R), rows):
            part = slice(start, start + rows)
            logits_RV = head(hidden_RN[part]).float()
            logprobs.append(logprobs_of(logits_RV, targets_R[part])[0])
            top.append(logits_RV.argmax(-1))
    return _joined(logprobs, hidden_RN), torch.cat(top) if top else targets_R.new_empty(0)


def _joined(chunks: list[torch.Tensor], hidden_RN: torch.Tensor) -> torch.Tensor:
    """Empty if a process of a divided pass has no targets."""
    return torch.cat(chunks) if chunks else hidden_RN.new_empty(0, dtype=torch.float32)


def token_logprobs(
    hidden_RN: torch.Tensor,
    targets_R: torch.Tensor,
    head: Head,
    *,
    vocabulary: int,
    sampling: Sampling = UNSHAPED,
    seen: PrecedingTokens | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
    weights: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 `(logprobs [R], entropies [R])` of `targets` under the distribution that `sampling` draws from.

    Gradients flow to `hidden` through both. Tokens removed by truncation count as constant, and are never targets.

    Args:
        weights: weights of the head, if it is trained; empty for a frozen one.
        seen: the tokens before each target; required if `sampling` penalises repetition.
    """
    assert seen is not None or sampling.repetition_penalty == 1.0
    if hidden_RN.requires_grad and _saves_slopes(hidden_RN, sampling):
        chunk_elements = min(chunk_elements, SAVED_CHUNK_ELEMENTS)
    rows = max(1, chunk_elements // vocabulary)
    found: tuple[torch.Tensor, torch.Tensor] = _TokenLogProbs.apply(
        hidden_RN, targets_R, head, sampling, seen if sampling.repetition_penalty != 1.0 else None, rows, *weights
    )
    return found
