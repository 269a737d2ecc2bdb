"""Which tokens stand before each target of a packed batch, for the penalty on repetition.

Belongs here: their positions by sequence, and masks of a chunk of targets. Does not belong here: what the penalty does
(`algorithms.distribution`), an engine's rows (`rollout.logits`).

Legend: `R` targets, `V` vocabulary, `B` branches, `S` distinct tokens of all branches together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from orbit_runtime.policy.packed import Branch

_NEVER = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class Seen:
    """Which tokens stand before each target of a packed batch: the prompt's, and those the answer has by then.

    A sequence is told by where each of its distinct tokens first stands, so that a chunk of targets has its mask by one
    comparison, however long the sequences are.
    """

    branch_R: torch.Tensor
    position_R: torch.Tensor
    """int32: where the target stands in its sequence."""
    token_S: torch.Tensor
    branch_S: torch.Tensor
    first_S: torch.Tensor
    """int32: where the token first stands in its branch's sequence."""
    starts: tuple[int, ...]
    """Of each branch in S, and the end."""
    branches: tuple[int, ...]
    """By target, on the host."""

    def of_targets(self, index_R: torch.Tensor) -> Seen:
        """Of some of the targets, in their order."""
        kept = index_R.tolist()
        branches = tuple(self.branches[number] for number in kept)
        return replace(self, branch_R=self.branch_R[index_R], position_R=self.position_R[index_R], branches=branches)

    def mask(self, part: slice, vocabulary: int) -> torch.Tensor:
        """bool `[rows, V]` for some neighbouring targets."""
        begin, end = self.branches[part][0], self.branches[part][-1] + 1
        own = slice(self.starts[begin], self.starts[end])
        device = self.token_S.device
        first_BV = torch.full((end - begin, vocabulary), _NEVER, dtype=torch.int32, device=device)
        first_BV[self.branch_S[own] - begin, self.token_S[own]] = self.first_S[own]
        return first_BV[self.branch_R[part] - begin] < self.position_R[part, None]


def build_seen(branches: Sequence[Branch], device: torch.device) -> Seen:
    """Of the targets of `build_packed(branches)`, in its order."""
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
        return torch.from_numpy(np.concatenate(parts)).to(device)

    branch_R = torch.tensor(targets, dtype=torch.long, device=device)
    return Seen(
        branch_R, tensor(positions), tensor(tokens), tensor(owners), tensor(firsts), tuple(starts), tuple(targets)
    )
