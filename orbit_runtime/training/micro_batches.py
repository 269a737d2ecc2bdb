"""Samples as the tensors of forward passes.

Legend: `D` samples, `R` trained tokens of a micro-batch, `T` packed tokens, `L` layers with routed experts, `C` experts
that a token goes to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from orbit_runtime.data.routing import unpack_experts
from orbit_runtime.data.samples import count_trained
from orbit_runtime.policy.distance import TeacherReport
from orbit_runtime.policy.packed import Branch, PackedBatch, lay_out_experts, to_device
from orbit_runtime.policy.preceding_tokens import PrecedingTokens, build_preceding
from orbit_runtime.policy.routing import OWN_CHOICE
from orbit_runtime.types import ColumnName, Sample, Sampling

Pack = Callable[[Sequence[Branch]], PackedBatch]


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward pass; flat over its trained tokens."""

    samples: Sequence[Sample]
    branches: Sequence[Branch]
    packed: PackedBatch
    columns_R: Mapping[ColumnName, torch.Tensor]
    """Columns of the trained tokens, fp32."""
    weights_R: torch.Tensor
    lengths_D: torch.Tensor
    """Trained tokens of each sample, int64."""
    trained_R: torch.Tensor
    """Targets that the loss mask keeps, as indices into the packed targets."""
    seen: PrecedingTokens | None
    """Tokens before each target, if sampling penalises their repetition."""
    number: int
    """Index among all micro-batches of its mini-batch, over all replicas; dropout is keyed by it."""
    counts: bool
    """False if another replica computes it as well; only that replica's result counts."""

    def routed_tokens(self) -> torch.Tensor | None:
        """`[T, L, C]`, built for one pass: for all samples of a step at once it could be larger than the model."""
        return lay_out_experts(self.branches, [_experts_of(each) for each in self.samples], self.packed)

    def teacher_report(self) -> TeacherReport:
        """The teacher's report on the trained tokens, made as their rollouts ended, on the device for one pass."""
        found = []
        for column, dtype in ((0, np.int32), (1, np.float32)):
            parts = []
            for sample in self.samples:
                assert sample.teacher_top is not None, "a teacher is asked about all rollouts of a run"
                rows = count_trained(sample.loss_mask_T)
                parts.append(np.frombuffer(sample.teacher_top[column], dtype).reshape(rows, -1))
            found.append(to_device(np.concatenate(parts), self.weights_R.device))
        return TeacherReport(*found)


def _experts_of(sample: Sample) -> np.ndarray | None:
    """`[inputs, L, C]`; None if no engine told any. What was given after the last answer no engine has read, as where a
    limit ends an episode: it goes where the routers choose."""
    if not sample.routed_experts:
        return None
    routed_TLC = unpack_experts(sample.routed_experts)
    read, inputs = len(routed_TLC), len(sample.token_ids_T) - 1
    if read >= inputs or 1 in sample.loss_mask_T[read + 1 :]:
        return routed_TLC
    return np.pad(routed_TLC, ((0, inputs - read), (0, 0), (0, 0)), constant_values=OWN_CHOICE)


def deal(count: int, replica: tuple[int, int]) -> list[tuple[int, bool]]:
    """The micro-batches of `count` that a replica computes, and whether each result counts.

    All replicas compute the same number, since with divided experts each pass needs every replica. A replica with
    fewer repeats a micro-batch, whose result does not count.

    Args:
        replica: its index, and the number of replicas.

    Example: `deal(3, (1, 2)) == [(1, True), (0, False)]`.
    """
    place, replicas = replica
    numbers = range(place, place + count + -count % replicas, replicas)
    return [(number, True) if number < count else (0, False) for number in numbers if count]


def build_micro_batch(
    samples: Sequence[Sample],
    weights: Sequence[float],
    pack: Pack,
    sampling: Sampling,
    device: torch.device,
    *,
    number: int = 0,
    counts: bool = True,
) -> MicroBatch:
    """Args: weights: weight of each sample's trained tokens in the loss."""
    branches, kept_D, trained = [], [], []
    offset = 0
    for sample in samples:
        cut, tokens_T = sample.prefix_length, sample.token_ids_T
        branches.append(Branch(sample.prefix_id, tokens_T[:cut], tokens_T[cut:]))
        kept = np.flatnonzero(sample.loss_mask_T)
        kept_D.append(kept)
        trained.append(offset + kept - cut)
        offset += len(tokens_T) - cut

    def joined(parts: Sequence[np.ndarray]) -> torch.Tensor:
        return to_device(np.concatenate(parts), device)

    columns_R = {
        name: joined([np.asarray(each.columns[name])[kept] for each, kept in zip(samples, kept_D, strict=True)])
        for name in samples[0].columns
    }
    counts_D = [len(kept) for kept in kept_D]
    weights_R = to_device(np.repeat(np.asarray(weights, np.float32), counts_D), device)
    return MicroBatch(
        samples,
        branches,
        pack(branches),
        columns_R,
        weights_R,
        to_device(counts_D, device),
        joined(trained),
        build_preceding(branches, device) if sampling.repetition_penalty != 1.0 else None,
        number,
        counts,
    )
