"""Keys and values of the rows that are being decoded, and the attention plan over them.

Belongs here: one preallocated block per engine, rows packed densely so that a decode step reads views, never copies.
Does not belong here: which request a row serves (`torch_engine`).

Legend: `Y` layers, `B` rows, `K` key/value heads, `S` positions, `D` head size, `H` query heads.
"""

from __future__ import annotations

import torch

from orbit_runtime.errors import UnsupportedError
from orbit_runtime.policy.attention import Kernel, attend_rows
from orbit_runtime.policy.packed import PackedBatch


class KVCache:
    """`[Y, 2, B, K, S, D]`, allocated at the first prefill that tells the heads' sizes; rows `[0, n)` are live."""

    def __init__(self, num_rows: int, num_positions: int) -> None:
        self.num_rows = num_rows
        self.num_positions = num_positions
        self._block: torch.Tensor | None = None

    def write_prompts(
        self,
        first_row: int,
        prompt_of_row: torch.Tensor,
        batch: PackedBatch,
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
        assert self._block is not None
        self._block[:, :, target, :, :num_positions] = self._block[:, :, source, :, :num_positions]

    def views(self, layer: int, num_rows: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._block is not None
        both = self._block[layer, :, :num_rows, :, :num_positions]
        return both[0], both[1]

    def append(self, layer: int, index_N: torch.Tensor, k_BK1D: torch.Tensor, v_BK1D: torch.Tensor) -> None:
        """Writes one position per row at flat indices from `flat_index`."""
        assert self._block is not None
        size = k_BK1D.shape[-1]
        self._block[layer, 0].view(-1, size).index_copy_(0, index_N, k_BK1D.reshape(-1, size))
        self._block[layer, 1].view(-1, size).index_copy_(0, index_N, v_BK1D.reshape(-1, size))

    def flat_index(self, position_B: torch.Tensor) -> torch.Tensor:
        """Index of (row, head, position) in the block flattened over those three, rows `[0, len(position))`."""
        assert self._block is not None
        heads = self._block.shape[3]
        rows = torch.arange(len(position_B) * heads, device=position_B.device) * self.num_positions
        return rows + position_B.repeat_interleave(heads)

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
    """Attention of one new token per row over its cached past."""

    def __init__(self, cache: KVCache, position_B: torch.Tensor, kernel: Kernel) -> None:
        self._cache = cache
        self._kernel: Kernel = kernel
        self._index = cache.flat_index(position_B)
        self._num_rows = len(position_B)
        low, high = int(position_B.min()), int(position_B.max())
        self._length = high + 1
        self._visible = None
        if low != high:
            steps = torch.arange(self._length, device=position_B.device)
            self._visible = (steps[None] <= position_B[:, None])[:, None, None]

    @property
    def longest(self) -> int:
        return self._length

    def attend(
        self, layer: int, q_BH1D: torch.Tensor, k_BK1D: torch.Tensor, v_BK1D: torch.Tensor, *, scale: float
    ) -> torch.Tensor:
        """Returns `[B, 1, H, D]`."""
        self._cache.append(layer, self._index, k_BK1D, v_BK1D)
        keys, values = self._cache.views(layer, self._num_rows, self._length)
        out = attend_rows(q_BH1D, keys, values, visible_B1QS=self._visible, scale=scale, kernel=self._kernel)
        return out.transpose(1, 2)
