"""Keys and values of the rows that are being decoded, and the attention plan over them.

Belongs here: one preallocated block per engine, rows packed densely so that a decode step reads views, never copies.
Does not belong here: which request a row serves (`torch_engine`).

Legend: `Y` layers, `B` rows, `K` key/value heads, `S` positions, `D` head size, `H` query heads.
"""

from __future__ import annotations

import numpy as np
import torch

from orbit_runtime.errors import UnsupportedError
from orbit_runtime.policy.attention import Kernel, attend_rows


class KVCache:
    """`[Y, 2, B, K, S, D]`, allocated at the first prefill that tells the heads' sizes; rows `[0, n)` are live.

    A position that was not written yet holds zeros or another run's values: finite, which is all a masked one must be.
    """

    def __init__(self) -> None:
        self.num_rows = self.num_positions = 0
        self._block: torch.Tensor | None = None

    def reserve(self, num_rows: int, num_positions: int) -> None:
        """Room for a run. An earlier run's block stays where it is large enough: touching new memory costs time."""
        if num_rows > self.num_rows or num_positions > self.num_positions:
            self.num_rows, self.num_positions = max(num_rows, self.num_rows), max(num_positions, self.num_positions)
            self._block = None

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
        index_BS = starts_P[prompt_of_row, None] + offsets.minimum(lengths_P[prompt_of_row, None] - 1)
        block = self._allocate(captured)
        rows = slice(first_row, first_row + len(prompt_of_row))
        for layer, pair in enumerate(captured):
            for which, source_TKD in enumerate(pair):
                block[layer, which, rows, :, :longest] = source_TKD[index_BS].transpose(1, 2)

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
            if key.shape != value.shape:
                raise UnsupportedError("keys and values of different head sizes are not supported by the torch engine")
            _, heads, size = key.shape
            shape = (len(captured), 2, self.num_rows, heads, self.num_positions, size)
            self._block = key.new_zeros(shape)
        return self._block


class DecodePlan:
    """Attention of one new token per row over its cached past.

    What every layer needs is cut from the block once, in one operation each: a decode step costs by the operation.
    """

    layout = (-1, 1)

    def __init__(self, cache: KVCache, positions_B: np.ndarray, kernel: Kernel) -> None:
        self._kernel: Kernel = kernel
        num_rows = len(positions_B)
        low, high = int(positions_B.min()), int(positions_B.max())
        self._length = high + 1
        block = cache.block
        past = block[:, :, :num_rows, :, : self._length]
        self._past = [layer.unbind(0) for layer in past.unbind(0)]
        self._flat = [layer.unbind(0) for layer in past.flatten(2, 3).unbind(0)]
        self._index: torch.Tensor | None = None
        self._visible: torch.Tensor | None = None
        self._hidden: torch.Tensor | None = None
        if low == high:
            self._newest = block[:, :, :num_rows, :, high].unbind(0)
        else:
            heads, size = block.shape[3], block.shape[5]
            self._newest = block.view(len(block), -1, size).unbind(0)
            rows = np.arange(2 * cache.num_rows * heads).reshape(2, -1)[:, : num_rows * heads] * cache.num_positions
            self._index = torch.from_numpy((rows + positions_B.repeat(heads)).reshape(-1)).to(block.device)
            visible = torch.from_numpy(np.arange(self._length) <= positions_B[:, None]).to(block.device)
            self._visible = visible[:, None, None]
            self._hidden = ~visible.repeat_interleave(heads, 0).unsqueeze(1)

    @property
    def longest(self) -> int:
        return self._length

    def attend(
        self, layer: int, q_BH1D: torch.Tensor, k_BK1D: torch.Tensor, v_BK1D: torch.Tensor, *, scale: float
    ) -> torch.Tensor:
        """Returns `[B, 1, H, D]`."""
        out = self.attend_tokens(layer, q_BH1D[:, :, 0], k_BK1D[:, :, 0], v_BK1D[:, :, 0], scale=scale)
        return out.view(len(out), 1, q_BH1D.shape[1], -1)

    def attend_tokens(
        self, layer: int, q_BHD: torch.Tensor, k_BKD: torch.Tensor, v_BKD: torch.Tensor, *, scale: float
    ) -> torch.Tensor:
        """Returns `[B, H·D]`."""
        new_2BKD = torch.stack((k_BKD, v_BKD))
        if self._index is None:
            self._newest[layer].copy_(new_2BKD)
        else:
            self._newest[layer].index_copy_(0, self._index, new_2BKD.view(-1, new_2BKD.shape[-1]))
        if self._kernel != "Eager":
            keys, values = self._past[layer]
            out = attend_rows(
                q_BHD.unsqueeze(2), keys, values, visible_B1QS=self._visible, scale=scale, kernel=self._kernel
            )
            return out.reshape(len(q_BHD), -1)
        # One query per row: two products over rows and heads at once. `G`: query heads of a key head.
        keys_NSD, values_NSD = self._flat[layer]
        scores_NGS = torch.bmm(q_BHD.reshape(len(keys_NSD), -1, q_BHD.shape[-1]), keys_NSD.transpose(1, 2))
        if scale != 1.0:
            scores_NGS.mul_(scale)
        if self._hidden is not None:
            scores_NGS.masked_fill_(self._hidden, float("-inf"))
        weights_NGS = torch.softmax(scores_NGS, dim=-1, dtype=torch.float32).to(values_NSD.dtype)
        return torch.bmm(weights_NGS, values_NSD).view(len(q_BHD), -1)
