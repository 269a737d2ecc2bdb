"""Tokens from logits: each row's bias and penalty, counter-based uniforms and inverse-CDF draws.

Belongs here: all randomness of an engine, and what changes logits before the temperature. Does not belong here: the
composition of the batch, the maths (`algorithms.distribution`). A row's draw depends only on its key and position, so
how a batch is composed changes nothing but rounding.

Legend: `B` live rows, `C` row capacity, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from orbit_runtime.algorithms.distribution import add_bias, penalise, truncate
from orbit_runtime.policy import native
from orbit_runtime.policy.logprobs import logprobs_of
from orbit_runtime.policy.packed import to_device
from orbit_runtime.types import Request

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(keys_B: np.ndarray, positions_B: np.ndarray) -> np.ndarray:
    """float64 in [0, 1), one per (key, position): output `position` of SplitMix64 seeded with the key.

    Args:
        keys_B: uint64 stream keys (`seeds.stream_key`).
        positions_B: number of tokens that the row has sampled before.

    Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014), figure 17; the top 53 bits.
    """
    z = keys_B + (positions_B.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True)
class Truncation:
    """`[B, 1]` each, or `None` if it truncates no row (`algorithms.distribution.truncate`)."""

    top_k: torch.Tensor | int | None = None
    """A number: that of every row."""
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None


WHOLE = Truncation()


def draw(
    logits_BV: torch.Tensor,
    uniforms_B: torch.Tensor,
    temperature_B1: torch.Tensor | None,
    truncation: Truncation = WHOLE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples one token per row; returns `(tokens [B] int64, logprobs [B] fp32)` under the distribution drawn from.

    Args:
        logits_BV: fp32.
        uniforms_B: float64 in [0, 1).
        temperature_B1: a row at exactly 0 is greedy, with its log-prob at temperature 1. `None`: 1 in every row.
        truncation: how each row's distribution is truncated.
    """
    logits = _cut(logits_BV, temperature_B1, truncation)
    greedy_B1 = temperature_B1 == 0 if temperature_B1 is not None else None
    if native.can_step(logits, torch.float32):
        return native.drawn(logits, uniforms_B if greedy_B1 is None else uniforms_B.masked_fill(greedy_B1[:, 0], -1.0))
    logprobs = torch.log_softmax(logits, dim=-1)
    # float64: over a large vocabulary an fp32 sum drops the tail.
    cdf = torch.exp(logprobs).cumsum(-1, dtype=torch.float64)
    # The first token whose cumulative mass exceeds the draw has mass itself, even if u rounds up to the total.
    targets = (uniforms_B[:, None] * cdf[:, -1:]).clamp_(max=torch.finfo(torch.float64).max)
    tokens = torch.searchsorted(cdf, targets, right=True).clamp_(max=logprobs.shape[-1] - 1)
    if greedy_B1 is not None:
        tokens = torch.where(greedy_B1, logits_BV.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


def most_probable(
    logits_BV: torch.Tensor, temperature_B1: torch.Tensor | None, truncation: Truncation, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` most probable tokens of each row under the distribution that `draw` samples from, in order of
    probability: `(tokens [B, K] int64, logprobs [B, K])`, with -inf for a truncated token."""
    logits_BV = _cut(logits_BV, temperature_B1, truncation)
    logits, tokens = logits_BV.topk(min(count, logits_BV.shape[-1]), -1)
    top_B = logprobs_of(logits_BV, tokens[:, 0])[0]
    return tokens, logits - logits[:, :1] + top_B[:, None]


def _cut(logits_BV: torch.Tensor, temperature_B1: torch.Tensor | None, truncation: Truncation) -> torch.Tensor:
    """Logits of the distribution that is drawn from; for a greedy row those at temperature 1."""
    logits = logits_BV if temperature_B1 is None else logits_BV / torch.where(temperature_B1 == 0, 1.0, temperature_B1)
    return truncate(logits, truncation.top_k, truncation.top_p, truncation.min_p)


Bias = tuple[tuple[int, float], ...]


class RowLogits:
    """Settings of at most `capacity` rows. They cost nothing until the first row that uses one."""

    def __init__(self, capacity: int) -> None:
        self._penalty_C1 = np.ones((capacity, 1), np.float32)
        self._any_penalty = False
        self._biases: list[Bias] = []
        """Bias of each live row."""
        self._any_bias = False
        self._seen_CV: torch.Tensor | None = None
        self._new: dict[int, tuple[int, ...]] = {}
        """Row → prompt and completion so far, for rows whose tokens are not yet marked as seen."""

    def grow(self, capacity: int) -> None:
        """Makes room for more rows; live ones stay."""
        more = capacity - len(self._penalty_C1)
        self._penalty_C1 = np.concatenate([self._penalty_C1, np.ones((more, 1), np.float32)])
        if self._seen_CV is not None:
            self._seen_CV = torch.cat([self._seen_CV, self._seen_CV.new_zeros(more, self._seen_CV.shape[1])])

    def admit(self, requests: Sequence[Request]) -> None:
        """Appends rows."""
        first = len(self._biases)
        self._biases.extend(request.sampling.logit_bias for request in requests)
        self._any_bias = self._any_bias or any(request.sampling.logit_bias for request in requests)
        for row, request in enumerate(requests, first):
            penalty = request.sampling.repetition_penalty
            self._penalty_C1[row] = penalty
            if penalty != 1.0:
                self._any_penalty = True
                so_far = request.so_far.token_ids_T if request.so_far else ()
                self._new[row] = (*request.prompt_ids_T, *so_far)

    def record(self, rows: slice, tokens_B: torch.Tensor) -> None:
        """Records one sampled token for each of `rows`."""
        if self._seen_CV is not None:
            index = torch.arange(rows.start, rows.stop, device=self._seen_CV.device)
            self._seen_CV[index, tokens_B.to(self._seen_CV.device)] = True

    def remove(self, remaining: int, sources: list[int], targets: list[int]) -> None:
        """Moves the rows `sources` to `targets`, and drops those from `remaining` on."""
        for source, target in zip(sources, targets, strict=True):
            self._biases[target] = self._biases[source]
        del self._biases[remaining:]
        self._penalty_C1[targets] = self._penalty_C1[sources]
        if self._seen_CV is not None and sources:
            self._seen_CV[targets] = self._seen_CV[sources]

    def apply(self, logits_BV: torch.Tensor, rows: slice) -> torch.Tensor:
        """fp32 logits of `rows`; the same tensor if no row has such a setting."""
        if self._any_bias:
            logits_BV = self._add_biases(logits_BV, rows)
        if self._any_penalty:
            seen_CV = self._mark_prompts(logits_BV)
            penalty_B1 = to_device(self._penalty_C1[rows], logits_BV.device)
            logits_BV = penalise(logits_BV, seen_CV[rows], penalty_B1)
        return logits_BV

    def _add_biases(self, logits_BV: torch.Tensor, rows: slice) -> torch.Tensor:
        grouped: dict[Bias, list[int]] = {}
        for row, bias in enumerate(self._biases[rows]):
            grouped.setdefault(bias, []).append(row)
        device, biased = logits_BV.device, logits_BV.clone()
        for bias, members in grouped.items():
            if bias:
                index = to_device(members, device)
                token_ids, values = zip(*bias, strict=True)
                biased[index] = add_bias(
                    logits_BV[index],
                    torch.tensor(token_ids, dtype=torch.long, device=device),
                    torch.tensor(values, dtype=torch.float32, device=device),
                )
        return biased

    def _mark_prompts(self, logits_BV: torch.Tensor) -> torch.Tensor:
        device = logits_BV.device
        if self._seen_CV is None:
            shape = (len(self._penalty_C1), logits_BV.shape[-1])
            self._seen_CV = torch.zeros(shape, dtype=torch.bool, device=device)
        for row, prompt in self._new.items():
            self._seen_CV[row] = False
            self._seen_CV[row, to_device(prompt, device)] = True
        self._new.clear()
        return self._seen_CV
