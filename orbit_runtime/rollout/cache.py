"""Keys and values of the rows being decoded, with the attention plan over them; without a cache, the rows' tokens.

Belongs here: one preallocated block per engine; rows are packed densely so that a decode step reads views, not copies.
Does not belong here: which request a row serves (`rows`), a model's own cache (`policy.whole_rows`).

Legend: `Y` layers, `B` rows, `K` key/value heads, `S` positions, `D` head size, `H` query heads.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from orbit_runtime.planner.activations import in_key_blocks
from orbit_runtime.policy import native
from orbit_runtime.policy.attention import (
    AttentionSettings,
    Kernel,
    attend_rows,
    fp32_product,
    softmax_with_sinks,
)
from orbit_runtime.policy.packed import PackedBatch, PackedPlan, to_device
from orbit_runtime.policy.whole_rows import OwnRows, WholeRows


class KVCache:
    """`[Y, 2, B, K, S, D]`, allocated at the first prefill, which gives the head sizes; rows `[0, n)` are live.

    Where keys and values have different sizes (MLA), the smaller ones leave the end of D unused. Positions not written
    yet hold zeros or values of an earlier request: finite, which is all that masked positions need.
    """

    def __init__(self) -> None:
        self.num_rows = self.num_positions = 0
        self._block: torch.Tensor | None = None

    def reserve(self, num_rows: int, num_positions: int, *, live: int) -> None:
        """Makes room. A block that is large enough is kept, because touching new memory costs time.

        Args:
            live: rows whose contents must survive.
        """
        if num_rows <= self.num_rows and num_positions <= self.num_positions:
            return
        old, positions = self._block, self.num_positions
        self.num_rows = max(num_rows, self.num_rows)
        self.num_positions = max(in_key_blocks(num_positions), self.num_positions)
        self._block = None
        if live and old is not None:
            layers, pair, _, heads, _, size = old.shape
            self._block = old.new_zeros(layers, pair, self.num_rows, heads, self.num_positions, size)
            self._block[:, :, :live, :, :positions] = old[:, :, :live]

    def prefill(self, batch: PackedBatch, kernel: Kernel) -> PackedPlan:
        return PackedPlan(batch, kernel, capture=True)

    def keep_prompts(
        self,
        first_row: int,
        prompt_of_row: torch.Tensor,
        starts_P: torch.Tensor,
        lengths_P: torch.Tensor,
        plan: PackedPlan,
    ) -> None:
        """Stores what a prefill with `plan` captured."""
        assert plan.captured is not None
        self.write_prompts(first_row, prompt_of_row, starts_P, lengths_P, plan.captured)

    def plan(self, _token_B: torch.Tensor, positions_B: np.ndarray, kernel: Kernel) -> DecodePlan:
        return DecodePlan(self, positions_B, kernel)

    def write_prompts(
        self,
        first_row: int,
        prompt_of_row: torch.Tensor,
        starts_P: torch.Tensor,
        lengths_P: torch.Tensor,
        captured: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Copies each prompt's keys and values into every row that samples from it, rows `first_row` onward."""
        longest = int(lengths_P.max())
        offsets = torch.arange(longest, device=starts_P.device)[None]
        index_PS = starts_P[:, None] + offsets.minimum(lengths_P[:, None] - 1)
        block = self._allocate(captured)
        rows = slice(first_row, first_row + len(prompt_of_row))
        for layer, pair in enumerate(captured):
            for which, source_TKD in enumerate(pair):
                of_prompts_PKSD = source_TKD[index_PS].transpose(1, 2).contiguous()
                of_rows_BKSD = of_prompts_PKSD.index_select(0, prompt_of_row)
                block[layer, which, rows, :, :longest, : source_TKD.shape[-1]] = of_rows_BKSD

    def move_rows(self, source: torch.Tensor, target: torch.Tensor, num_positions: int) -> None:
        """Copies whole rows; `source` and `target` are disjoint."""
        self.block[:, :, target, :, :num_positions] = self.block[:, :, source, :, :num_positions]

    @property
    def block(self) -> torch.Tensor:
        assert self._block is not None, "no prompt was written yet"
        return self._block

    def _allocate(self, captured: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        if self._block is None:
            key, value = captured[0]
            heads, size = key.shape[1], max(key.shape[2], value.shape[2])
            shape = (len(captured), 2, self.num_rows, heads, self.num_positions, size)
            self._block = key.new_zeros(shape)
        return self._block


_Masks = tuple[torch.Tensor | None, torch.Tensor | None]
"""Of the keys that rows see, as what is added to scores, `[B, 1, 1, S]`, and do not see, `[B·K, 1, S]`; None if every
row sees everything."""


class DecodePlan:
    """Attention of one new token per row over its cached past.

    The views that layers need are made once, in one operation each: a decode step's cost grows with its operations.
    """

    layout = (-1, 1)

    def __init__(self, cache: KVCache, positions_B: np.ndarray, kernel: Kernel) -> None:
        num_rows = len(positions_B)
        num_keys = int(positions_B.max()) + 1
        block = cache.block
        self._is_fused = kernel != "Eager"
        self.longest = in_key_blocks(num_keys) if self._is_fused else num_keys
        past = block[:, :, :num_rows, :, : self.longest]
        self._past = [layer.unbind(0) for layer in past.unbind(0)]
        self._positions_B, self._device = positions_B, block.device
        self._heads = block.shape[3]
        is_native = self._is_fused and native.can_attend(block)
        self._table = native.decode_table(positions_B, self._heads, cache.num_positions) if is_native else None
        self._masks: dict[int | None, _Masks] = {}
        if not is_native:
            heads, size = block.shape[3], block.shape[5]
            self._newest = block.view(len(block), -1, size).unbind(0)
            rows = np.arange(2 * cache.num_rows * heads).reshape(2, -1)[:, : num_rows * heads] * cache.num_positions
            self._index = to_device((rows + positions_B.repeat(heads)).reshape(-1), block.device)

    def _mask(self, window: int | None) -> _Masks:
        if window not in self._masks:
            keys, newest = np.arange(self.longest), self._positions_B[:, None]
            visible = keys <= newest
            if window is not None:
                visible &= keys > newest - window
            added = hidden = None
            if not visible.all():
                made = to_device(visible, self._device)
                hidden = (~made).repeat_interleave(self._heads, 0).unsqueeze(1)
                added = self._past[0][0].new_zeros(made.shape).masked_fill_(~made, float("-inf"))[:, None, None]
            self._masks[window] = added, hidden
        return self._masks[window]

    def attend(
        self, layer: int, q_BH1D: torch.Tensor, k_BK1D: torch.Tensor, v_BK1D: torch.Tensor, look: AttentionSettings
    ) -> torch.Tensor:
        """Returns `[B, 1, H, D]`."""
        out = self.attend_tokens(layer, q_BH1D[:, :, 0], k_BK1D[:, :, 0], v_BK1D[:, :, 0], look)
        return out.view(len(out), 1, q_BH1D.shape[1], -1)

    def attend_tokens(
        self, layer: int, q_BHD: torch.Tensor, k_BKD: torch.Tensor, v_BKD: torch.Tensor, look: AttentionSettings
    ) -> torch.Tensor:
        """Returns `[B, H·D]`, with D of the values."""
        key_size, value_size = k_BKD.shape[-1], v_BKD.shape[-1]
        size = max(key_size, value_size)
        if key_size != value_size:
            q_BHD, k_BKD, v_BKD = (F.pad(each, (0, size - each.shape[-1])) for each in (q_BHD, k_BKD, v_BKD))
        out_BN = self._attend(layer, q_BHD, (k_BKD, v_BKD), look)
        return out_BN if value_size == size else out_BN.unflatten(-1, (-1, size))[..., :value_size].flatten(1)

    def _attend(
        self, layer: int, q_BHD: torch.Tensor, newest: tuple[torch.Tensor, torch.Tensor], look: AttentionSettings
    ) -> torch.Tensor:
        if self._table is not None:
            for past_BKSD, new_BKD in zip(self._past[layer], newest, strict=True):
                native.keep(past_BKSD, new_BKD, self._positions_B)
            keys_SKD, values_SKD = (each[0].transpose(0, 1) for each in self._past[layer])
            return native.attend(q_BHD, keys_SKD, values_SKD, self._table, look, None).flatten(1)
        self._newest[layer].index_copy_(0, self._index, torch.stack(newest).flatten(0, 2))
        added, hidden = self._mask(look.window)
        if self._is_fused and look.is_plain:
            keys, values = self._past[layer]
            # The heads that share keys are queries of one head, so that no key is read twice.
            q_BKGD = q_BHD.unflatten(1, (self._heads, -1))
            out = attend_rows(q_BKGD, keys, values, visible_B1QS=added, look=look, kernel="SDPA")
            return out.reshape(len(q_BHD), -1)
        # One query per row: two products over rows and heads at once. `G`: query heads per key head.
        keys_NSD, values_NSD = (each.flatten(0, 1) for each in self._past[layer])
        scores_NGS = fp32_product(q_BHD.reshape(len(keys_NSD), -1, q_BHD.shape[-1]), keys_NSD.transpose(1, 2))
        if look.scale != 1.0:
            scores_NGS.mul_(look.scale)
        scores_NGS = look.capped(scores_NGS)
        if hidden is not None:
            scores_NGS.masked_fill_(hidden, float("-inf"))
        if look.sinks_H is None:
            weights_NGS = torch.softmax(scores_NGS, dim=-1, dtype=torch.float32)
        else:
            sinks_NG = look.sinks_H.to(scores_NGS.dtype).expand(len(q_BHD), -1).reshape(scores_NGS.shape[:-1])
            weights_NGS = softmax_with_sinks(scores_NGS, sinks_NG)
        return torch.bmm(weights_NGS.to(values_NSD.dtype), values_NSD).view(len(q_BHD), -1)


class TokenHistory:
    """`[B, S]` token ids; rows `[0, n)` are live. Positions after a row's newest hold arbitrary values."""

    def __init__(self, is_single: bool) -> None:
        self._is_single = is_single
        self._tokens_BS = torch.empty(0, 0, dtype=torch.long)

    def reserve(self, num_rows: int, num_positions: int, *, live: int) -> None:
        """Makes room; `live` rows keep their contents."""
        old = self._tokens_BS
        num_rows, num_positions = max(num_rows, old.shape[0]), max(num_positions, old.shape[1])
        if (num_rows, num_positions) != old.shape:
            self._tokens_BS = torch.zeros(num_rows, num_positions, dtype=torch.long, device=old.device)
            self._tokens_BS[:live, : old.shape[1]] = old[:live]

    def prefill(self, batch: PackedBatch, _kernel: Kernel) -> OwnRows:
        return OwnRows(batch, self._is_single)

    def keep_prompts(
        self,
        first_row: int,
        prompt_of_row: torch.Tensor,
        starts_P: torch.Tensor,
        lengths_P: torch.Tensor,
        plan: OwnRows,
    ) -> None:
        batch = plan.batch
        self._tokens_BS = self._tokens_BS.to(batch.token_ids_T.device)
        for offset, prompt in enumerate(prompt_of_row.tolist()):
            start, length = int(starts_P[prompt]), int(lengths_P[prompt])
            self._tokens_BS[first_row + offset, :length] = batch.token_ids_T[start : start + length]

    def move_rows(self, source: torch.Tensor, target: torch.Tensor, num_positions: int) -> None:
        """Copies whole rows; `source` and `target` are disjoint."""
        self._tokens_BS[target, :num_positions] = self._tokens_BS[source, :num_positions]

    def plan(self, token_B: torch.Tensor, positions_B: np.ndarray, _kernel: Kernel) -> WholeRows:
        """The rows with their newest tokens appended."""
        newest_B = to_device(positions_B, token_B.device)
        rows = self._tokens_BS[: len(token_B)]
        rows[torch.arange(len(rows), device=rows.device), newest_B] = token_B
        return WholeRows(rows[:, : int(positions_B.max()) + 1], newest_B, self._is_single)
