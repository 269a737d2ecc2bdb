"""Tokens that precede each target of a packed batch, for the repetition penalty.

Legend: `R` targets, `V` vocabulary, `B` branches, `S` distinct tokens of all branches together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from orbit_runtime.policy.packed import Branch, to_device

_NEVER = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class PrecedingTokens:
    """The tokens before each target of a packed batch: those of the prompt, and those of the completion so far.

    A sequence is represented by the first position of each of its distinct tokens, so the mask for a chunk of targets
    takes one comparison, however long the sequences are.
    """

    branch_R: torch.Tensor
    position_R: torch.Tensor
    """int32: the target's position in its sequence."""
    token_S: torch.Tensor
    branch_S: torch.Tensor
    first_S: torch.Tensor
    """int32: the token's first position in its branch's sequence."""
    starts: tuple[int, ...]
    """Start of each branch in S, and the end."""
    branches: tuple[int, ...]
    """Branch of each target, on the host."""

    def of_targets(self, index_R: torch.Tensor) -> PrecedingTokens:
        """The same for a subset of the targets, in the order of `index_R`."""
        kept = index_R.tolist()
        branches = tuple(self.branches[number] for number in kept)
        return replace(self, branch_R=self.branch_R[index_R], position_R=self.position_R[index_R], branches=branches)

    def mask(self, part: slice, vocabulary: int) -> torch.Tensor:
        """bool `[rows, V]` for a run of consecutive targets."""
        begin, end = self.branches[part][0], self.branches[part][-1] + 1
        own = slice(self.starts[begin], self.starts[end])
        device = self.token_S.device
        first_BV = torch.full((end - begin, vocabulary), _NEVER, dtype=torch.int32, device=device)
        first_BV[self.branch_S[own] - begin, self.token_S[own]] = self.first_S[own]
        return first_BV[self.branch_R[part] - begin] < self.position_R[part, None]


def build_preceding(branches: Sequence[Branch], device: torch.device) -> PrecedingTokens:
    """The tokens before each target of `build_packed(branches)`, in their order."""
    tokens, firsts, owners, starts, targets, positions = [], [], [], [0], [], []
    for number, branch in enumerate(branches):
        prefix, whole = len(branch.prefix_T), np.array([*branch.prefix_T, *branch.continuation_T], np.int64)
        distinct, first = np.unique(whole, return_index=True)
        tokens.append(distinct)
        firsts.append(first.astype(np.int32))
        owners.append(np.full(len(distinct), number))
        starts.append(starts[-1] + len(distinct))
        targets += [number] * len(branch.continuation_T)
        positions.append(np.arange(prefix, len(whole), dtype=np.int32))

    def tensor(parts: list[np.ndarray]) -> torch.Tensor:
        return to_device(np.concatenate(parts), device)

    branch_R = to_device(targets, device)
    return PrecedingTokens(
        branch_R, tensor(positions), tensor(tokens), tensor(owners), tensor(firsts), tuple(starts), tuple(targets)
    )
