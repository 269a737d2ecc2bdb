"""Whole sequences packed into one row of tokens, each shared prompt computed once.

Belongs here: the layout of a micro-batch and the attention plan over it.
Does not belong here: which samples form a micro-batch (`data.packing`), losses.

Sixteen answers to one prompt need its keys and values once: the prompt's tokens stand once in the row, each answer's
tokens follow, and an answer's queries see the prompt and their own past, nothing else. The result is the same function
as sixteen separate sequences; only the order of sums in a gradient differs.

Legend: `T` packed tokens, `R` targets (tokens whose log-prob is asked), `B` rows of one attention call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from orbit_runtime.policy.attention import Kernel, Look, attend_rows

BUCKET_RATIO = 1.5
"""Rows of one attention call differ in length by at most this factor, so padding wastes at most a third of it."""


@dataclass(frozen=True)
class Branch:
    """One sequence as prefix + continuation; equal `prefix_id` means an equal, shared prefix."""

    prefix_id: int
    prefix_T: Sequence[int]
    continuation_T: Sequence[int]
    """Its log-probs are asked for; the last token is a target only, never an input."""


@dataclass(frozen=True)
class Bucket:
    """Rows of similar length that attend in one call."""

    query_BQ: torch.Tensor
    """Packed index of each query; padding repeats the row's first query."""
    key_BS: torch.Tensor
    visible_B1QS: torch.Tensor
    position_BQ: torch.Tensor
    """Of the query in its sequence; keys stand at theirs. Padding repeats the last one."""


@dataclass(frozen=True)
class PackedBatch:
    """Token row, positions and targets of a micro-batch.

    Example: branches (prefix [5,6], continuations [7,8] and [9]) pack to tokens `[5,6,7]`, positions `[0,1,2]`,
    targets `[7,8,9]` read from packed positions `[1,2,1]`.
    """

    token_ids_T: torch.Tensor
    position_T: torch.Tensor
    target_ids_R: torch.Tensor
    target_source_R: torch.Tensor
    """Packed index whose hidden state predicts the target."""
    buckets: tuple[Bucket, ...]
    unsort_T: torch.Tensor
    """Where each packed token stands among all buckets' queries, padding counted."""
    longest: int


@dataclass(frozen=True)
class _Row:
    first: int
    length: int
    prefix_first: int
    prefix_length: int


def build_packed(branches: Sequence[Branch], device: torch.device) -> PackedBatch:
    """Lays branches out in order. Prefixes must not be empty, continuations neither."""
    tokens: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    sources: list[int] = []
    rows: list[_Row] = []
    placed: dict[int, _Row] = {}
    longest = 0
    for branch in branches:
        prefix_row = placed.get(branch.prefix_id)
        if prefix_row is None:
            prefix_row = _Row(len(tokens), len(branch.prefix_T), len(tokens), 0)
            placed[branch.prefix_id] = prefix_row
            rows.append(prefix_row)
            tokens.extend(branch.prefix_T)
            positions.extend(range(prefix_row.length))
        first, inputs = len(tokens), len(branch.continuation_T) - 1
        tokens.extend(branch.continuation_T[:-1])
        positions.extend(range(prefix_row.length, prefix_row.length + inputs))
        if inputs:
            rows.append(_Row(first, inputs, prefix_row.first, prefix_row.length))
        targets.extend(branch.continuation_T)
        sources.append(prefix_row.first + prefix_row.length - 1)
        sources.extend(range(first, first + inputs))
        longest = max(longest, prefix_row.length + inputs)

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    groups = _buckets(rows)
    buckets = tuple(_build_bucket(group, device) for group in groups)
    unsort = _unsort(groups, len(tokens))
    return PackedBatch(
        tensor(tokens), tensor(positions), tensor(targets), tensor(sources), buckets, tensor(unsort), longest
    )


def _unsort(groups: list[list[_Row]], num_tokens: int) -> list[int]:
    where = [0] * num_tokens
    start = 0
    for group in groups:
        width = max(row.length for row in group)
        for row in group:
            where[row.first : row.first + row.length] = range(start, start + row.length)
            start += width
    return where


def _buckets(rows: list[_Row]) -> list[list[_Row]]:
    """Rows sorted by what they cost, cut where the next is longer than the first by more than the ratio."""
    groups: list[list[_Row]] = []
    ordered = sorted(rows, key=lambda row: (row.prefix_length > 0, row.length, row.prefix_length, row.first))
    for row in ordered:
        head = groups[-1][0] if groups else None
        fits = (
            head is not None
            and (head.prefix_length > 0) == (row.prefix_length > 0)
            and row.length <= max(head.length * BUCKET_RATIO, head.length + 4)
            and row.prefix_length <= max(head.prefix_length * BUCKET_RATIO, head.prefix_length + 8)
        )
        if fits:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _build_bucket(rows: list[_Row], device: torch.device) -> Bucket:
    first, length, prefix_first, prefix_length = (
        torch.tensor([getattr(row, name) for row in rows], dtype=torch.long, device=device)[:, None]
        for name in ("first", "length", "prefix_first", "prefix_length")
    )
    queries = torch.arange(max(row.length for row in rows), device=device)[None]
    keys = torch.arange(max(row.prefix_length + row.length for row in rows), device=device)[None]
    real_BQ = queries < length
    query_BQ = first + torch.where(real_BQ, queries, 0)
    in_prefix_BS = keys < prefix_length
    own_BS = keys - prefix_length
    key_BS = torch.where(in_prefix_BS, prefix_first + keys, first + own_BS.clamp(min=0).minimum(length - 1))
    # A padded query sees the row's first key, so that its (discarded) output stays finite.
    visible = in_prefix_BS[:, None] | ((own_BS[:, None] <= queries[:, :, None]) & (own_BS < length)[:, None])
    visible[:, :, 0] = True
    return Bucket(query_BQ, key_BS, visible[:, None], prefix_length + queries.minimum(length - 1))


def gather_rows(source_TN: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`source[index]`, whose backward adds the cells that read one row in the order in which they stand.

    No one operation does so on both kinds of device (docs/decisions/0087). The backward of indexing adds atomically on
    a CPU, and after a sort on a GPU. That of an embedding gives each thread rows of its own on a CPU, where it is the
    fastest as well, and has a race on a GPU (pytorch/pytorch#187687).
    """
    return source_TN[index] if source_TN.is_cuda else F.embedding(index, source_TN)


def _is_near(position_BQ: torch.Tensor, num_keys: int, window: int) -> torch.Tensor:
    """`[B, 1, Q, S]`; keys stand at their positions."""
    keys = torch.arange(num_keys, device=position_BQ.device)
    return keys > position_BQ[:, None, :, None] - window


class PackedPlan:
    """Attention over a `PackedBatch`. With `capture`, every layer's keys and values are kept (the engine's prefill)."""

    layout = (1, -1)

    def __init__(self, batch: PackedBatch, kernel: Kernel, *, capture: bool = False) -> None:
        self.batch = batch
        self.kernel: Kernel = kernel
        self.captured: list[tuple[torch.Tensor, torch.Tensor]] | None = [] if capture else None
        self._windowed: dict[int, list[torch.Tensor]] = {}

    @property
    def longest(self) -> int:
        return self.batch.longest

    def attend(
        self, layer: int, q_1HTD: torch.Tensor, k_1KTD: torch.Tensor, v_1KTD: torch.Tensor, look: Look
    ) -> torch.Tensor:
        q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (q_1HTD, k_1KTD, v_1KTD))
        out_TN = self.attend_tokens(layer, q_THD, k_TKD, v_TKD, look)
        return out_TN.unflatten(-1, (q_THD.shape[1], -1))[None]

    def attend_tokens(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, look: Look
    ) -> torch.Tensor:
        """`[T, H·D]`."""
        if self.captured is not None:
            self.captured.append((k_TKD, v_TKD))
        q_TN, k_TN, v_TN = (x.flatten(1) for x in (q_THD, k_TKD, v_TKD))
        heads, kv_heads = q_THD.shape[1], k_TKD.shape[1]
        pieces = []
        for bucket, visible in zip(self.batch.buckets, self._visible(look.window), strict=True):
            q, k, v = (
                gather_rows(source, index).unflatten(-1, (count, -1)).transpose(1, 2)
                for source, index, count in (
                    (q_TN, bucket.query_BQ, heads),
                    (k_TN, bucket.key_BS, kv_heads),
                    (v_TN, bucket.key_BS, kv_heads),
                )
            )
            out = attend_rows(q, k, v, visible_B1QS=visible, look=look, kernel=self.kernel)
            pieces.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
        return gather_rows(torch.cat(pieces), self.batch.unsort_T)

    def _visible(self, window: int | None) -> list[torch.Tensor]:
        """`[B, 1, Q, S]` of every bucket; made once for all layers with the same window."""
        buckets = self.batch.buckets
        if window is None:
            return [bucket.visible_B1QS for bucket in buckets]
        if window not in self._windowed:
            self._windowed[window] = [
                bucket.visible_B1QS & _is_near(bucket.position_BQ, bucket.key_BS.shape[1], window) for bucket in buckets
            ]
        return self._windowed[window]
