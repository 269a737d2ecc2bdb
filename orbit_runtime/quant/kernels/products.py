"""The kernels as products that autograd functions call: `linear.Product` and `grouped.GroupedProduct`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from orbit_runtime.quant.kernels import launch
from orbit_runtime.quant.kernels.dense import grouped_dense
from orbit_runtime.quant.kernels.operands import Operands, WeightForm

ROWS_MULTIPLE = 128


@dataclass(frozen=True, slots=True)
class FusedProduct:
    """Dequantises in registers."""

    form: WeightForm

    def forward(self, x: Tensor, bias: Tensor | None, packed: Sequence[Tensor]) -> Tensor:
        y = launch.forward(x.reshape(-1, self.form.columns), Operands(self.form, *packed), bias=bias)
        return y.view(*x.shape[:-1], self.form.rows)

    def input_gradient(self, dy: Tensor, packed: Sequence[Tensor]) -> Tensor:
        dx = launch.input_gradient(dy.reshape(-1, self.form.rows), Operands(self.form, *packed))
        return dx.view(*dy.shape[:-1], self.form.columns)


@dataclass(frozen=True, slots=True)
class DequantizedProduct:
    """Dense in runs of rows of at most `dense_bytes`, then torch's matmul."""

    form: WeightForm
    dense_bytes: int

    def forward(self, x: Tensor, bias: Tensor | None, packed: Sequence[Tensor]) -> Tensor:
        rows, run = self.form.rows, self._run()
        if run >= rows:
            return torch.nn.functional.linear(x, self._dense(packed, 0, rows), bias)
        flat_x = x.reshape(-1, self.form.columns)
        y = flat_x.new_empty(len(flat_x), rows)
        for start in range(0, rows, run):
            stop = min(start + run, rows)
            # The bias is added here: added to a rounded sum, it would cause a second rounding.
            part = None if bias is None else bias[start:stop]
            y[:, start:stop] = torch.nn.functional.linear(flat_x, self._dense(packed, start, stop), part)
        return y.view(*x.shape[:-1], rows)

    def input_gradient(self, dy: Tensor, packed: Sequence[Tensor]) -> Tensor:
        rows, run = self.form.rows, self._run()
        if run >= rows:
            return dy @ self._dense(packed, 0, rows)
        flat_dy = dy.reshape(-1, rows)
        # Summed in fp32: a BF16 sum over runs would round once more per run.
        dx = flat_dy.new_zeros(len(flat_dy), self.form.columns, dtype=torch.float32)
        for start in range(0, rows, run):
            stop = min(start + run, rows)
            dx += flat_dy[:, start:stop] @ self._dense(packed, start, stop)
        return dx.to(dy.dtype).view(*dy.shape[:-1], self.form.columns)

    def _run(self) -> int:
        fitting = self.dense_bytes // (2 * self.form.columns)
        return max(fitting // ROWS_MULTIPLE * ROWS_MULTIPLE, ROWS_MULTIPLE)

    def _dense(self, packed: Sequence[Tensor], start: int, stop: int) -> Tensor:
        return launch.dequantize(Operands(self.form, *packed), first_row=start, num_rows=stop - start)[0]


@dataclass(frozen=True, slots=True)
class DequantizedGroupedProduct:
    """Dense in runs of rows of all experts at once, of at most `dense_bytes`, then torch's grouped product."""

    form: WeightForm
    dense_bytes: int

    def forward(self, x_TK: Tensor, offsets_E: Tensor, packed: Sequence[Tensor]) -> Tensor:
        y_TN = x_TK.new_empty(len(x_TK), self.form.rows)
        for start, stop in self._runs():
            y_TN[:, start:stop] = grouped_dense(x_TK, self._dense(packed, start, stop).transpose(1, 2), offsets_E)
        return y_TN

    def input_gradient(self, dy_TN: Tensor, offsets_E: Tensor, packed: Sequence[Tensor]) -> Tensor:
        runs = self._runs()
        if len(runs) == 1:
            return grouped_dense(dy_TN, self._dense(packed, 0, self.form.rows), offsets_E)
        # Summed in fp32: a BF16 sum over runs would round once more per run.
        dx_TK = dy_TN.new_zeros(len(dy_TN), self.form.columns, dtype=torch.float32)
        for start, stop in runs:
            dx_TK += grouped_dense(dy_TN[:, start:stop], self._dense(packed, start, stop), offsets_E)
        return dx_TK.to(dy_TN.dtype)

    def _runs(self) -> list[tuple[int, int]]:
        fitting = self.dense_bytes // (2 * self.form.columns * self.form.num_experts)
        run = max(fitting // ROWS_MULTIPLE * ROWS_MULTIPLE, ROWS_MULTIPLE)
        return [(start, min(start + run, self.form.rows)) for start in range(0, self.form.rows, run)]

    def _dense(self, packed: Sequence[Tensor], start: int, stop: int) -> Tensor:
        """`[E, stop - start, K]`."""
        return launch.dequantize(Operands(self.form, *packed), first_row=start, num_rows=stop - start)


@dataclass(frozen=True, slots=True)
class FusedGroupedProduct:
    """Every expert's tokens times its weight, in one launch."""

    form: WeightForm

    def forward(self, x_TK: Tensor, offsets_E: Tensor, packed: Sequence[Tensor]) -> Tensor:
        return launch.forward(x_TK, Operands(self.form, *packed), offsets_E=offsets_E)

    def input_gradient(self, dy_TN: Tensor, offsets_E: Tensor, packed: Sequence[Tensor]) -> Tensor:
        return launch.input_gradient(dy_TN, Operands(self.form, *packed), offsets_E=offsets_E)
