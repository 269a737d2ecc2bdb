"""Tokens of the rows being decoded, for models without a KV cache in this engine.

Belongs here: the interface of `cache.KVCache`, with tokens instead of keys and values.
Does not belong here: computing the rows again (`policy.whole_rows`).
"""

from __future__ import annotations

import numpy as np
import torch

from orbit_runtime.policy.attention import Kernel
from orbit_runtime.policy.packed import PackedBatch, PackedPlan
from orbit_runtime.policy.whole_rows import WholeRows


class TokenHistory:
    """`[B, S]` token ids; rows `[0, n)` are live. Positions after a row's newest hold arbitrary values."""

    def __init__(self) -> None:
        self._tokens_BS = torch.empty(0, 0, dtype=torch.long)

    def reserve(self, num_rows: int, num_positions: int, *, live: int) -> None:
        """Makes room; `live` rows keep their contents."""
        old = self._tokens_BS
        num_rows, num_positions = max(num_rows, old.shape[0]), max(num_positions, old.shape[1])
        if (num_rows, num_positions) != old.shape:
            self._tokens_BS = torch.zeros(num_rows, num_positions, dtype=torch.long, device=old.device)
            self._tokens_BS[:live, : old.shape[1]] = old[:live]

    def keep_prompts(
        self,
        first_row: int,
        prompt_of_row: torch.Tensor,
        starts_P: torch.Tensor,
        lengths_P: torch.Tensor,
        batch: PackedBatch,
        _plan: PackedPlan,
    ) -> None:
        self._tokens_BS = self._tokens_BS.to(batch.token_ids_T.device)
        for offset, prompt in enumerate(prompt_of_row.tolist()):
            start, length = int(starts_P[prompt]), int(lengths_P[prompt])
            self._tokens_BS[first_row + offset, :length] = batch.token_ids_T[start : start + length]

    def move_rows(self, source: torch.Tensor, target: torch.Tensor, num_positions: int) -> None:
        """Copies whole rows; `source` and `target` are disjoint."""
        self._tokens_BS[target, :num_positions] = self._tokens_BS[source, :num_positions]

    def plan(self, token_B: torch.Tensor, positions_B: np.ndarray, _kernel: Kernel) -> WholeRows:
        """The rows with their newest tokens appended."""
        newest_B = torch.from_numpy(positions_B).to(token_B.device)
        rows = self._tokens_BS[: len(token_B)]
        rows[torch.arange(len(rows), device=rows.device), newest_B] = token_B
        return WholeRows(rows[:, : int(positions_B.max()) + 1], newest_B)
