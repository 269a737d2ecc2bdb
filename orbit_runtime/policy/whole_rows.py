"""Passes of models whose sequences cannot be packed: every sequence has its own row, from its first token on.

A shared prompt is recomputed with each completion, and a decode step recomputes the whole row: correct, but slow.

Legend: `B` rows, `S` positions, `Q` requested positions, `T` packed tokens, `N` hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from orbit_runtime.adapters.layer import Selection
from orbit_runtime.policy.packed import PackedBatch, gather_rows

Decoder = Callable[[Tensor], Tensor]
"""Token ids `[B, S]` → hidden states `[B, S, N]`; padding is at the end, where no real position sees it."""


@dataclass(frozen=True, eq=False)
class WholeRows:
    """The rows of a decode step so far; the newest token of each is requested."""

    token_BS: Tensor
    newest_B: Tensor
    """Position of each row's newest token."""


def packed_hidden(decoder: Decoder, batch: PackedBatch, selection: Selection) -> Tensor:
    """`[T, N]` of a packed batch: its buckets already list the tokens that every row sees, in order."""
    pieces = []
    for bucket in batch.buckets:
        hidden_BSN = _by_slot(decoder, batch.token_ids_T[bucket.key_BS], bucket.query_BQ[:, 0], selection)
        rows, positions = hidden_BSN.shape[:2]
        first_B1 = torch.arange(rows, device=hidden_BSN.device)[:, None] * positions
        pieces.append(gather_rows(hidden_BSN.flatten(0, 1), (first_B1 + bucket.position_BQ).flatten()))
    return gather_rows(torch.cat(pieces), batch.unsort_T)


def newest_hidden(decoder: Decoder, rows: WholeRows, selection: Selection) -> Tensor:
    """`[B, N]`."""
    index_B = torch.arange(len(rows.newest_B), device=rows.newest_B.device)
    return _by_slot(decoder, rows.token_BS, index_B, selection)[index_B, rows.newest_B]


def _by_slot(decoder: Decoder, token_BS: Tensor, place_B: Tensor, selection: Selection) -> Tensor:
    """Processes all rows of one adapter at a time. `place_B`: each row's first token, as segments count."""
    active = selection.active
    if active is None or isinstance(active, str):
        return decoder(token_BS)
    slots = [next((name for name, first, end in active if first <= place < end), None) for place in place_B.tolist()]
    parts, order = [], []
    for slot in dict.fromkeys(slots):
        rows = [row for row, name in enumerate(slots) if name == slot]
        with selection.only(slot):
            parts.append(decoder(token_BS[rows]))
        order += rows
    return torch.cat(parts)[torch.tensor(order, device=token_BS.device).argsort()]
