"""Whole sequences packed into one row of tokens, with each shared prompt computed once.

Belongs here: the layout of a micro-batch and the attention plan over it.
Does not belong here: which samples form a micro-batch (`data.packing`), losses.

Sixteen completions of one prompt need its keys and values only once: the row has the prompt's tokens once, followed by
the tokens of each completion, whose queries see the prompt and their own past and nothing else. The result is the same
function as for sixteen separate sequences; only the order of sums in a gradient differs.

Legend: `T` packed tokens, `R` targets (tokens whose log-prob is requested), `B` rows of one attention call, `L` layers
with routed experts, `C` experts that a token goes to.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from orbit_runtime.errors import InternalError
from orbit_runtime.policy import native
from orbit_runtime.policy.attention import (
    AttentionSettings,
    Kernel,
    Visible,
    attend_rows,
)
from orbit_runtime.policy.chunked import attend_chunked
from orbit_runtime.policy.routing import OWN_CHOICE
from orbit_runtime.types import TOKENS

BUCKET_RATIO = 1.5
"""Rows of one attention call differ in length at most by this factor, so padding wastes at most a third of it."""
OWN_RATIO = 1.25
"""The same for sequences in rows of their own: all of a layer computes their padding, not only attention."""


ProcessIndex = tuple[int, int]
"""A process's index among several that divide a pass's tokens, and their number."""


def own_tokens(num_tokens: int, context: ProcessIndex) -> tuple[range, range]:
    """Two runs, one from each end: a late token sees more keys than an early one, so this balances the work.

    `num_tokens` is a multiple of twice the number of processes.

    Example: `own_tokens(8, (0, 2)) == (range(0, 2), range(6, 8))`.
    """
    place, count = context
    size = num_tokens // (2 * count)
    mirrored = 2 * count - 1 - place
    return range(place * size, (place + 1) * size), range(mirrored * size, (mirrored + 1) * size)


def to_device(values: np.ndarray | Sequence[int], device: torch.device) -> torch.Tensor:
    """A copy of the values. The host does not wait for the device: CUDA takes them from the host's memory before this
    returns."""
    return torch.tensor(values).to(device, non_blocking=True)


@dataclass(frozen=True)
class Branch:
    """One sequence as prefix + continuation; an equal `prefix_id` means an equal, shared prefix."""

    prefix_id: int
    prefix_T: Sequence[int]
    continuation_T: Sequence[int]
    """Tokens whose log-probs are requested; the last one is only a target, never an input."""


@dataclass(frozen=True)
class Bucket:
    """Rows of similar length that attend in one call."""

    query_BQ: torch.Tensor
    """Packed index of each query; padding repeats the row's first query."""
    key_BS: torch.Tensor
    position_BQ: torch.Tensor
    """Position of the query in its sequence; padding repeats the last one."""
    before_B: torch.Tensor
    """Number of the row's own tokens before its first query."""
    length_B: torch.Tensor
    """Number of the row's own tokens that its last query sees."""
    prefix_length_B: torch.Tensor
    starts_later: bool
    """False if every query sees exactly the keys up to its own position."""

    def visible(self, window: int | None) -> torch.Tensor:
        """bool `[B, 1, Q, S]`: which keys each query sees. As large as the scores of one head."""
        device = self.query_BQ.device
        queries = torch.arange(self.query_BQ.shape[1], device=device)[None]
        keys = torch.arange(self.key_BS.shape[1], device=device)[None]
        in_prefix_BS, own_BS = keys < self.prefix_length_B[:, None], keys - self.prefix_length_B[:, None]
        own_queries_BQ = queries + self.before_B[:, None]
        seen = (own_BS[:, None] <= own_queries_BQ[:, :, None]) & (own_BS < self.length_B[:, None])[:, None]
        visible = in_prefix_BS[:, None] | seen
        # A padded query sees the row's first key, so that its (discarded) output stays finite.
        visible[:, :, 0] = True
        if window is not None:
            visible &= keys[:, None] > self.position_BQ[:, :, None] - window
        return visible[:, None]


@dataclass(frozen=True)
class PackedBatch:
    """Token row, positions and targets of a micro-batch. If processes divide its tokens, the row and its queries are
    this process's tokens; keys and targets are given by their index among all tokens.

    Example: branches (prefix [5,6], continuations [7,8] and [9]) pack to tokens `[5,6,7]`, positions `[0,1,2]`,
    targets `[7,8,9]` read from packed positions `[1,2,1]`.
    """

    token_ids_T: torch.Tensor
    position_T: torch.Tensor
    target_ids_R: torch.Tensor
    target_source_R: torch.Tensor
    """Packed index whose hidden state predicts the target."""
    rows: tuple[Row, ...]
    longest: int
    places_T: torch.Tensor | None = None
    """Indices of this process's tokens among all tokens, padding included; None if it has all."""
    num_tokens: int = 0
    """Tokens of all processes together, padding included."""
    own_targets: tuple[torch.Tensor, torch.Tensor] | None = None
    """The targets whose log-probs this process computes, in order, and the index of each one's hidden state among its
    own tokens; None if it computes all."""

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """For attention without Orbit's kernel."""
        return tuple(_build_bucket(group, self.token_ids_T.device) for group in _buckets(self.rows))

    @cached_property
    def unsort_T(self) -> torch.Tensor:
        """Index of each packed token among all buckets' queries, padding included."""
        return to_device(_unsort(_buckets(self.rows), len(self.token_ids_T)), self.token_ids_T.device)


@dataclass(frozen=True)
class Row:
    """A run of packed tokens that sees a prefix, which is another run, and its own past."""

    first: int
    """Index of its first query among this process's tokens."""
    length: int
    prefix_first: int
    prefix_length: int
    before: int
    """Number of its tokens before the first query; they belong to another process."""
    own_first: int
    """Index of its first token among all tokens."""


ROW_FIELDS: Callable[[Row], tuple[int, int, int, int, int, int]]
ROW_FIELDS = attrgetter("first", "length", "prefix_first", "prefix_length", "before", "own_first")


def build_packed(branches: Sequence[Branch], device: torch.device, context: ProcessIndex = (0, 1)) -> PackedBatch:
    """Lays branches out in order. Prefixes and continuations must not be empty.

    Args:
        context: this process's index among those that divide the tokens, and their number.
    """
    tokens, targets = array(TOKENS), array(TOKENS)
    rows: list[Row] = []
    placed: dict[int, Row] = {}
    # Of each branch: the last token of its prefix, its own first token, and its targets.
    lasts: list[int] = []
    firsts: list[int] = []
    counts: list[int] = []
    longest = 0
    for branch in branches:
        prefix_row = placed.get(branch.prefix_id)
        if prefix_row is None:
            prefix_row = Row(len(tokens), len(branch.prefix_T), len(tokens), 0, 0, len(tokens))
            placed[branch.prefix_id] = prefix_row
            rows.append(prefix_row)
            tokens.extend(branch.prefix_T)
        first, inputs = len(tokens), len(branch.continuation_T) - 1
        tokens.extend(branch.continuation_T[:-1])
        if inputs:
            rows.append(Row(first, inputs, prefix_row.first, prefix_row.length, 0, first))
        targets.extend(branch.continuation_T)
        lasts.append(prefix_row.first + prefix_row.length - 1)
        firsts.append(first)
        counts.append(inputs + 1)
        longest = max(longest, prefix_row.length + inputs)

    def tensor(values: np.ndarray) -> torch.Tensor:
        return to_device(values.astype(np.int64), device)

    places = None
    laid_out = rows
    if context[1] > 1:
        missing = -len(tokens) % (2 * context[1])
        if missing:
            rows.append(Row(len(tokens), missing, len(tokens), 0, 0, len(tokens)))
            tokens.extend([tokens[0]] * missing)
        runs = own_tokens(len(tokens), context)
        places = np.concatenate([np.asarray(run, np.int64) for run in runs])
        rows = _cut_rows(rows, runs)
    all_tokens, all_positions = np.frombuffer(tokens, np.int32), _positions(laid_out)
    held = all_tokens if places is None else all_tokens[places]
    return PackedBatch(
        tensor(held),
        tensor(all_positions if places is None else all_positions[places]),
        tensor(np.frombuffer(targets, np.int32)),
        tensor(_sources(lasts, firsts, counts)),
        tuple(rows),
        longest,
        None if places is None else tensor(places),
        len(tokens),
    )


def _positions(rows: Sequence[Row]) -> np.ndarray:
    """The position of each token in its sequence. `rows` lie one after the other, and each begins its own tokens."""
    lengths = [row.length for row in rows]
    return np.arange(sum(lengths)) + np.repeat([row.prefix_length - row.first for row in rows], lengths)


def _sources(lasts: Sequence[int], firsts: Sequence[int], counts: Sequence[int]) -> np.ndarray:
    """Each target's source: of a branch's first one, the prefix's last token; of the others, the token before."""
    starts = np.cumsum(counts) - counts
    sources = np.arange(sum(counts)) + np.repeat(firsts - starts - 1, counts)
    sources[starts] = lasts
    return sources


def _cut_rows(rows: Sequence[Row], runs: Sequence[range]) -> list[Row]:
    """The parts of each row that lie in these runs of all tokens."""
    cut = []
    for row in rows:
        start = 0
        for run in runs:
            first, stop = max(row.first, run.start), min(row.first + row.length, run.stop)
            if first < stop:
                place, before = start + first - run.start, first - row.first
                cut.append(Row(place, stop - first, row.prefix_first, row.prefix_length, before, row.first))
            start += len(run)
    return cut


def lay_out_experts(
    branches: Sequence[Branch], routed: Sequence[np.ndarray | None], batch: PackedBatch
) -> torch.Tensor | None:
    """int16 `[T, L, C]` on the batch's device, in the order of the batch's tokens; None if no branch is known.

    A shared prefix uses the experts of its first branch that has any.

    Args:
        routed: experts of each branch, `[inputs, L, C]`, starting with the prefix; None if unknown.
    """
    known = next((each for each in routed if each is not None), None)
    if known is None:
        return None
    laid_out = np.full((batch.num_tokens, *known.shape[1:]), OWN_CHOICE, np.int16)
    first_of: dict[int, int] = {}
    told: set[int] = set()
    end = 0
    for branch, routed_TLC in zip(branches, routed, strict=True):
        prefix, inputs = len(branch.prefix_T), len(branch.continuation_T) - 1
        if branch.prefix_id not in first_of:
            first_of[branch.prefix_id] = end
            end += prefix
        if routed_TLC is not None:
            if len(routed_TLC) != prefix + inputs:
                raise InternalError(f"experts of {len(routed_TLC)} tokens for {prefix + inputs} inputs")
            if branch.prefix_id not in told:
                told.add(branch.prefix_id)
                first = first_of[branch.prefix_id]
                laid_out[first : first + prefix] = routed_TLC[:prefix]
            laid_out[end : end + inputs] = routed_TLC[prefix:]
        end += inputs
    whole = to_device(laid_out, batch.token_ids_T.device)
    return whole if batch.places_T is None else whole[batch.places_T]


def _unsort(groups: list[list[Row]], num_tokens: int) -> np.ndarray:
    lengths = np.array([row.length for group in groups for row in group])
    widths = np.repeat([max(row.length for row in group) for group in groups], [len(group) for group in groups])
    offsets = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    where = np.zeros(num_tokens, np.int64)
    firsts = np.repeat([row.first for group in groups for row in group], lengths)
    where[firsts + offsets] = np.repeat(np.cumsum(widths) - widths, lengths) + offsets
    return where


def _buckets(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows sorted by cost, split where the next row exceeds the first by more than the ratio."""

    ordered = sorted(rows, key=lambda row: (_seen(row) > 0, row.length, _seen(row), row.first))
    return _grouped(
        ordered,
        lambda head, row: (
            (_seen(head) > 0) == (_seen(row) > 0)
            and row.length <= max(head.length * BUCKET_RATIO, head.length + 4)
            and _seen(row) <= max(_seen(head) * BUCKET_RATIO, _seen(head) + 8)
        ),
    )


def own_buckets(rows: Sequence[Row], device: torch.device) -> Iterator[Bucket]:
    """Rows that are computed with their prefixes, by the length of both, longest first."""

    groups = _grouped(
        sorted(rows, key=_whole_length, reverse=True),
        lambda head, row: _whole_length(head) <= max(_whole_length(row) * OWN_RATIO, _whole_length(row) + 4),
    )
    return (_build_bucket(group, device) for group in groups)


def _grouped(rows: Sequence[Row], fits: Callable[[Row, Row], bool]) -> list[list[Row]]:
    """Rows in their order, split where one does not fit the first of its group. Args: fits: called with both."""
    groups: list[list[Row]] = []
    for row in rows:
        if groups and fits(groups[-1][0], row):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _whole_length(row: Row) -> int:
    return row.prefix_length + row.length


def _seen(row: Row) -> int:
    """Number of keys that all of its queries see."""
    return row.prefix_length + row.before


def _build_bucket(rows: list[Row], device: torch.device) -> Bucket:
    first, length, prefix_first, prefix_length, before, own_first = (
        to_device([getattr(row, name) for row in rows], device)[:, None]
        for name in ("first", "length", "prefix_first", "prefix_length", "before", "own_first")
    )
    queries = torch.arange(max(row.length for row in rows), device=device)[None]
    keys = torch.arange(max(_seen(row) + row.length for row in rows), device=device)[None]
    query_BQ = first + torch.where(queries < length, queries, 0)
    in_prefix_BS = keys < prefix_length
    own_BS = keys - prefix_length
    end = before + length
    key_BS = torch.where(in_prefix_BS, prefix_first + keys, own_first + own_BS.clamp(min=0).minimum(end - 1))
    position_BQ = prefix_length + before + queries.minimum(length - 1)
    starts_later = any(_seen(row) for row in rows)
    return Bucket(query_BQ, key_BS, position_BQ, before[:, 0], end[:, 0], prefix_length[:, 0], starts_later)


def gather_rows(source_TN: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`source[index]`, whose backward sums the rows with the same index in their order.

    No single operation does so on both kinds of device (decision 5). The backward of indexing adds atomically
    on a CPU, and after a sort on a GPU. That of an embedding gives each thread its own rows on a CPU, where it is also
    the fastest, and has a race on a GPU (pytorch/pytorch#187687).
    """
    return source_TN[index] if source_TN.is_cuda else F.embedding(index, source_TN)


class PackedPlan:
    """Attention over a `PackedBatch`. With `capture`, every layer's keys and values are kept (the engine's prefill)."""

    layout = (1, -1)

    def __init__(
        self,
        batch: PackedBatch,
        kernel: Kernel,
        *,
        capture: bool = False,
        meet: Callable[[Tensor], Tensor] | None = None,
        is_alone: bool = True,
    ) -> None:
        """Args:
        meet: rows of this process's tokens → rows of all tokens; None if it has all.
        is_alone: whether this process holds the whole model. Ranks on a CPU keep what they keep on a GPU, as planned.
        """
        self.batch = batch
        self._meet = meet
        self._is_alone = is_alone
        self.kernel: Kernel = kernel
        self.captured: list[tuple[torch.Tensor, torch.Tensor]] | None = [] if capture else None
        self._made: dict[Any, Any] = {}

    @property
    def longest(self) -> int:
        return self.batch.longest

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns, made by the first layer that asks for it under this key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def attend(
        self, layer: int, q_1HTD: torch.Tensor, k_1KTD: torch.Tensor, v_1KTD: torch.Tensor, look: AttentionSettings
    ) -> torch.Tensor:
        q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (q_1HTD, k_1KTD, v_1KTD))
        out_TN = self.attend_tokens(layer, q_THD, k_TKD, v_TKD, look)
        return out_TN.unflatten(-1, (q_THD.shape[1], -1))[None]

    def attend_tokens(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, look: AttentionSettings
    ) -> torch.Tensor:
        """`[T, H·D]`."""
        if self.captured is not None:
            self.captured.append((k_TKD, v_TKD))
        if self._meet is not None:
            met_TN = self._meet(torch.cat((k_TKD.flatten(1), v_TKD.flatten(1)), 1))
            width, kv_heads = k_TKD.shape[1] * k_TKD.shape[2], k_TKD.shape[1]
            k_TKD, v_TKD = (x.unflatten(-1, (kv_heads, -1)) for x in (met_TN[:, :width], met_TN[:, width:]))
        table = None
        if self.kernel != "Eager" and self._is_alone and self._meet is None and native.can_attend(q_THD):
            table = self.once("table", lambda: native.table_of([*map(ROW_FIELDS, self.batch.rows)]))
        if self.kernel == "Chunked" or table is not None:
            return attend_chunked(q_THD, k_TKD, v_TKD, self.batch.rows, look, table_R7=table).flatten(1)
        pieces = []
        for number, bucket in enumerate(self.batch.buckets):
            q, k, v = (
                gather_rows(x_THD.flatten(1), index).unflatten(-1, x_THD.shape[1:]).transpose(1, 2)
                for x_THD, index in ((q_THD, bucket.query_BQ), (k_TKD, bucket.key_BS), (v_TKD, bucket.key_BS))
            )
            visible = self._visible_of(number, bucket, look)
            out = attend_rows(q, k, v, visible_B1QS=visible, look=look, kernel=self.kernel)
            pieces.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
        return gather_rows(torch.cat(pieces), self.batch.unsort_T)

    def _visible_of(self, number: int, bucket: Bucket, look: AttentionSettings) -> Visible:
        """The mask, built once for all layers with the same window; not needed if the fused kernel can derive it."""
        if self.kernel == "SDPA" and not bucket.starts_later and look.window is None and look.is_plain:
            return "causal"
        visible: torch.Tensor = self.once((number, look.window), lambda: bucket.visible(look.window))
        return visible
