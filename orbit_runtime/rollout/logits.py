"""Row settings that change logits before the temperature: a bias by token, and a penalty on tokens seen.

Belongs here: these settings and the tokens seen, by row. Does not belong here: the maths (`algorithms.distribution`),
truncation and draws (`sampling`).

Legend: `B` live rows, `C` row capacity, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from orbit_runtime.algorithms.distribution import add_bias, penalise
from orbit_runtime.types import Request

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
            penalty_B1 = torch.tensor(self._penalty_C1[rows], device=logits_BV.device)
            logits_BV = penalise(logits_BV, seen_CV[rows], penalty_B1)
        return logits_BV

    def _add_biases(self, logits_BV: torch.Tensor, rows: slice) -> torch.Tensor:
        grouped: dict[Bias, list[int]] = {}
        for row, bias in enumerate(self._biases[rows]):
            grouped.setdefault(bias, []).append(row)
        device, biased = logits_BV.device, logits_BV.clone()
        for bias, members in grouped.items():
            if bias:
                index = torch.tensor(members, device=device)
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
            self._seen_CV[row, torch.tensor(prompt, device=device)] = True
        self._new.clear()
        return self._seen_CV
