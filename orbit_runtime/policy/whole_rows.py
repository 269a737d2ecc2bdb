"""Passes of models whose sequences cannot be packed: every sequence has its own row, from its first token on.

A shared prompt is recomputed with each completion. A decode step reads the model's own cache, one for all rows; where
that is wrong, it recomputes the rows.

Belongs here: laying the rows out, the adapter of each row, the model's cache. Does not belong here: sampling
(`rollout`), which models need this (`probe`).

Legend: `B` rows, `S` positions, `Q` requested positions, `T` packed tokens, `N` hidden size, `P` prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from orbit_runtime.adapters.layer import Selection
from orbit_runtime.policy.attention import layers_of
from orbit_runtime.policy.packed import PackedBatch, gather_rows, own_buckets, to_device


class Decoder(Protocol):
    """Token ids and positions `[B, S]` → hidden states `[B, S, N]`; padding is at the end, where no real position sees
    it. Further arguments are transformers'."""

    def __call__(self, token_BS: Tensor, position_BS: Tensor, **cached: Any) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class OwnRows:
    """A packed batch whose sequences have rows of their own."""

    batch: PackedBatch
    is_single: bool = False
    """Whether each sequence has a pass of its own."""

    def hidden(self, decoder: Decoder, selection: Selection) -> Tensor:
        """A shared prefix is read from the first row that has it."""
        batch = self.batch
        shared = {row.prefix_first for row in batch.rows if row.prefix_length}
        rows = [row for row in batch.rows if row.prefix_length or row.first not in shared]
        pieces, tokens = [], []
        for bucket in own_buckets(rows, batch.token_ids_T.device):
            lengths = (bucket.prefix_length_B + bucket.length_B).tolist() if self.is_single else None
            first_B = bucket.query_BQ[:, 0]
            pieces.append(
                _by_slot(decoder, batch.token_ids_T[bucket.key_BS], first_B, selection, lengths).flatten(0, 1)
            )
            tokens.append(bucket.key_BS.flatten())
        token_P = torch.cat(tokens)
        # Padding repeats a row's last token after it: a stable sort reads each token from where it stands first.
        token_P, order_P = torch.sort(token_P, stable=True)
        first_T = torch.searchsorted(token_P, torch.arange(len(batch.token_ids_T), device=token_P.device))
        return gather_rows(torch.cat(pieces), order_P[first_T])


@dataclass(frozen=True, eq=False)
class WholeRows:
    """The rows of a decode step so far; the newest token of each is requested."""

    token_BS: Tensor
    newest_B: Tensor
    """Position of each row's newest token."""
    is_single: bool = False

    def hidden(self, decoder: Decoder, selection: Selection) -> Tensor:
        index_B = torch.arange(len(self.newest_B), device=self.newest_B.device)
        lengths = (self.newest_B + 1).tolist() if self.is_single else None
        return _by_slot(decoder, self.token_BS, index_B, selection, lengths)[index_B, self.newest_B]


def _by_slot(
    decoder: Decoder, token_BS: Tensor, place_B: Tensor, selection: Selection, lengths: Sequence[int] | None
) -> Tensor:
    """Processes all rows of one adapter at a time.

    Args:
        place_B: each row's first token, as segments count.
        lengths: of the rows, if each is to have a pass of its own.
    """
    slots = _slots(place_B, selection)
    if lengths is None and len(set(slots)) == 1:
        with selection.only(slots[0]):
            return _pass(decoder, token_BS)
    keys = slots if lengths is None else list(enumerate(slots))
    parts, order = [], []
    for key in dict.fromkeys(keys):
        rows = [row for row, other in enumerate(keys) if other == key]
        with selection.only(slots[rows[0]]):
            hidden_BSN = _pass(decoder, token_BS[rows] if lengths is None else token_BS[rows, : lengths[rows[0]]])
        parts.append(F.pad(hidden_BSN, (0, 0, 0, token_BS.shape[1] - hidden_BSN.shape[1])))
        order += rows
    return torch.cat(parts)[torch.tensor(order, device=token_BS.device).argsort()]


def _slots(place_B: Tensor, selection: Selection) -> list[str | None]:
    active = selection.active
    if active is None or isinstance(active, str):
        return [active] * len(place_B)
    return [next((name for name, first, end in active if first <= place < end), None) for place in place_B.tolist()]


def _pass(decoder: Decoder, token_BS: Tensor, **cached: Any) -> Tensor:
    return decoder(token_BS, torch.arange(token_BS.shape[1], device=token_BS.device).expand_as(token_BS), **cached)


@dataclass(frozen=True, eq=False)
class OwnPrefill:
    """Prompts whose states are kept in the model's own cache."""

    batch: PackedBatch
    build: Callable[[], Cache]
    made: list[tuple[Cache, int]] = field(default_factory=list)
    """Filled by the pass: the cache of every prompt, in the batch's order, and its width."""

    def hidden(self, decoder: Decoder, selection: Selection) -> Tensor:
        """Prompts of one length and adapter have one pass: a state must not contain padding."""
        tokens_T, rows = self.batch.token_ids_T, self.batch.rows
        slots = _slots(torch.tensor([row.first for row in rows]), selection)
        groups: dict[tuple[str | None, int], list[int]] = {}
        for number, (row, slot) in enumerate(zip(rows, slots, strict=True)):
            groups.setdefault((slot, row.length), []).append(number)
        hidden_of: dict[int, Tensor] = {}
        caches = []
        for (slot, length), numbers in groups.items():
            token_BS = torch.stack([tokens_T[rows[number].first :][:length] for number in numbers])
            cache = self.build()
            with selection.only(slot):
                hidden_BSN = _pass(decoder, token_BS, past_key_values=cache, use_cache=True)
            hidden_of |= dict(zip(numbers, hidden_BSN.unbind(), strict=True))
            caches.append((cache, length))
        joined, width = _join(caches)
        order = torch.tensor([number for numbers in groups.values() for number in numbers], device=tokens_T.device)
        joined.reorder_cache(order.argsort())
        self.made.append((joined, width))
        return torch.cat([hidden_of[number] for number in range(len(rows))])


@dataclass(frozen=True, eq=False)
class OwnStep:
    """The newest token of each row, after the states in the model's own cache."""

    token_B: Tensor
    position_B: Tensor
    cache: Cache
    mask_BS: Tensor | None
    """Which entries of the cache, the newest included, are the row's own; None: all."""

    def hidden(self, decoder: Decoder, selection: Selection) -> Tensor:
        selection.rows = len(self.token_B)
        try:
            hidden_B1N = decoder(
                self.token_B[:, None],
                self.position_B[:, None],
                past_key_values=self.cache,
                attention_mask=self.mask_BS,
                use_cache=True,
            )
        finally:
            selection.rows = None
        return hidden_B1N[:, 0]


class OwnCache:
    """The model's own cache, one for all rows: keys and values of shorter rows begin with padding."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._cache: Cache | None = None
        self._rows = self._width = 0

    def reserve(self, num_rows: int, num_positions: int, *, live: int) -> None:
        """It grows by itself."""

    def prefill(self, batch: PackedBatch, _kernel: Any) -> OwnPrefill:
        return OwnPrefill(batch, self._build)

    def _build(self) -> Cache:
        """Layers with a window keep everything, so that rows of any length fit together; the mask has the window."""
        cache = DynamicCache(config=self._config)
        for number, layer in enumerate(cache.layers):
            if type(layer) is DynamicSlidingWindowLayer:
                cache.layers[number] = DynamicLayer()
            elif type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
                cache.layers[number] = LinearAttentionAndFullAttentionLayer(layer.number_of_states)
        return cache

    def keep_prompts(
        self, first_row: int, prompt_of_row: Tensor, _starts_P: Tensor, _lengths_P: Tensor, plan: OwnPrefill
    ) -> None:
        """Appends a row for each that samples from a prompt."""
        ((cache, width),) = plan.made
        cache.reorder_cache(prompt_of_row)
        self._cut(first_row)
        kept = [] if self._cache is None else [(self._cache, self._width)]
        self._cache, self._width = _join([*kept, (cache, width)])
        self._rows = first_row + len(prompt_of_row)

    def move_rows(self, source: Tensor, target: Tensor, _num_positions: int) -> None:
        """Copies whole rows; `source` and `target` are disjoint."""
        assert self._cache is not None
        order = torch.arange(self._rows, device=source.device)
        order[target] = source
        self._cache.reorder_cache(order)

    def plan(self, token_B: Tensor, positions_B: np.ndarray, _kernel: Any) -> OwnStep:
        self._cut(len(positions_B))
        assert self._cache is not None
        longest = int(positions_B.max())
        if longest < self._width:
            for layer in self._cache.layers:
                _each_sequence(layer, lambda x: x[..., self._width - longest :, :])
            self._width = longest
        position_B = to_device(positions_B, token_B.device)
        mask_BS = None
        if int(positions_B.min()) < longest and any(hasattr(layer, "keys") for layer in self._cache.layers):
            places = torch.arange(longest + 1, device=token_B.device)
            mask_BS = (places >= (longest - position_B)[:, None]).long()
        self._width += 1
        return OwnStep(token_B, position_B, self._cache, mask_BS)

    def _cut(self, num_rows: int) -> None:
        """Drops rows that have ended."""
        if not num_rows:
            self._cache = None
        elif self._cache is not None and num_rows < self._rows:
            self._cache.reorder_cache(torch.arange(num_rows))
        self._rows = num_rows


def keep_states(model: nn.Module) -> None:
    """Makes blocks that hold their states themselves (RecurrentGemma's) read and write those in a pass's cache."""
    for number, block in enumerate(getattr(layer, "temporal_block", None) for layer in layers_of(model)):
        if hasattr(block, "conv1d_state"):
            block.forward = partial(_run_block, block.forward, number)


def _run_block(own: Any, number: int, x_BSN: Tensor, *, past_key_values: Any = None, **named: Any) -> Any:
    """The newest inputs of the block's convolution are one fewer than a layer of the cache keeps."""
    if past_key_values is None:
        return own(x_BSN, **named)
    block, held = own.__self__, past_key_values.layers[number]
    if not isinstance(held, LinearAttentionLayer):
        held = past_key_values.layers[number] = LinearAttentionLayer()
    conv, block.rg_lru.recurrent_states = held.conv_states[0], held.recurrent_states[0]
    block.conv1d_state = None if conv is None else conv[..., 1:]
    out = own(x_BSN, **named)
    held.update_conv_state(block.conv1d_state, conv_kernel_size=block.conv1d_width)
    held.update_recurrent_state(block.rg_lru.recurrent_states)
    return out


def _each_sequence(layer: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Changes what a layer keeps of every token, `[B, …, S, D]`."""
    for name in ("keys", "values", "indexer_keys"):
        held = getattr(layer, name, None)
        if isinstance(held, Tensor) and held.numel():
            setattr(layer, name, change(held))


def _join(caches: Sequence[tuple[Cache, int]]) -> tuple[Cache, int]:
    """One cache of all rows, in this order, and its width."""
    width = max(each for _, each in caches)
    if len(caches) == 1:
        return caches[0]
    for cache, own in caches:
        for layer in cache.layers:
            _each_sequence(layer, lambda x, own=own: F.pad(x, (0, 0, width - own, 0)))  # type: ignore[misc]
    first = caches[0][0]
    for layers in zip(*(cache.layers for cache, _ in caches), strict=True):
        for name, held in vars(layers[0]).items():
            others = [getattr(each, name) for each in layers]
            if isinstance(held, Tensor) and held.numel() and held.dim() > 1:
                setattr(layers[0], name, torch.cat(others))
            elif name in ("conv_states", "recurrent_states"):
                held |= {key: _cat(each[key] for each in others) for key in held}
    return first, width


def _cat(states: Iterable[Tensor | None]) -> Tensor | None:
    held = [each for each in states if each is not None]
    return torch.cat(held) if held else None
