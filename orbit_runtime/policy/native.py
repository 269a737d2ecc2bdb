"""Attention on a CPU by Orbit's own kernel, `attention.c`.

Belongs here: calling it. Does not belong here: which passes use it (`packed`, `rollout.cache`).

Legend: see `chunked`; `R` runs of tokens (`packed.Row`).
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, Structure, byref, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from orbit_runtime.policy.attention import AttentionSettings
from orbit_runtime.quant.kernels.compiled import compiled

SOURCE = Path(__file__).with_name("attention.c")


class _Rows(Structure):
    _fields_ = (("data", c_void_p), ("token", c_int64), ("head", c_int64), ("size", c_int64))


class _Attention(Structure):
    """`Attention` of the source."""

    _fields_ = (
        *((name, _Rows) for name in ("q", "k", "v", "dout")),
        *((name, c_void_p) for name in ("runs", "sinks", "out", "lse", "dq", "dk", "dv")),
        *((name, c_int64) for name in ("num_runs", "tokens", "heads", "kv_heads", "window")),
        *((name, c_float) for name in ("scale", "cap")),
        *((name, c_int32) for name in ("is_bf16", "threads")),
    )


def kernel() -> CDLL | None:
    return compiled(SOURCE)


def can_attend(q: Tensor) -> bool:
    """Whether the kernel takes queries like these."""
    return q.device.type == "cpu" and q.dtype in {torch.float32, torch.bfloat16} and kernel() is not None


def table_of(runs: Sequence[tuple[int, int, int, int, int, int]]) -> np.ndarray:
    """int64 `[R, 7]`, as the kernel reads it, of runs with the fields of `Row` in their order."""
    table_R7 = np.empty((len(runs), 7), np.int64)
    newest: dict[int, int] = {}
    for number, run in enumerate(runs):
        table_R7[number] = *run, -1
        prefix = run[2] if run[3] else run[0]
        if prefix in newest and run[3]:
            table_R7[newest[prefix], 6] = number
        newest[prefix] = number
    return table_R7


def decode_table(positions_B: np.ndarray, heads: int, num_positions: int) -> np.ndarray:
    """The table of one query per row over a cache `[B, K, S, D]`, whose places count from the first row's first key.
    `heads`: K; `num_positions`: S."""
    rows, zeros = np.arange(len(positions_B)), np.zeros_like(positions_B)
    places = rows * heads * num_positions
    return np.stack((rows, zeros + 1, zeros, zeros, positions_B, places, zeros - 1), 1).astype(np.int64)


def attend(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, table_R7: np.ndarray, look: AttentionSettings, lse_HT: Tensor | None
) -> Tensor:
    """`[T, H, D of v]`; writes the log of each query's sum of exponentials, fp32, where it is asked for."""
    q_THD, k_TKD, v_TKD = map(_plain, (q_THD, k_TKD, v_TKD))
    out_THD = q_THD.new_empty(*q_THD.shape[:2], v_TKD.shape[-1])
    given, _held = _given(q_THD, k_TKD, v_TKD, table_R7, look, out_THD, lse_HT)
    kernel().attend(byref(given))  # type: ignore[union-attr]
    return out_THD


def gradients(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    dout_THD: Tensor,
    table_R7: np.ndarray,
    look: AttentionSettings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Those of queries, keys and values, given that of what `attend` returned."""
    q_THD, k_TKD, v_TKD, dout_THD = map(_plain, (q_THD, k_TKD, v_TKD, dout_THD))
    given, _held = _given(q_THD, k_TKD, v_TKD, table_R7, look, out_THD, lse_HT)
    given.dout = _rows(dout_THD)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q_THD, k_TKD, v_TKD))
    given.dq, given.dk, given.dv = dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
    kernel().attend_backward(byref(given))  # type: ignore[union-attr]
    return dq, dk, dv


def _given(
    q: Tensor, k: Tensor, v: Tensor, table: np.ndarray, look: AttentionSettings, out: Tensor, lse: Tensor | None
) -> tuple[_Attention, Tensor | None]:
    """With what must outlive the call beside the arguments."""
    sinks = None if look.sinks_H is None else look.sinks_H.float().contiguous()
    return _Attention(
        *(_rows(each) for each in (q, k, v)),
        runs=table.ctypes.data, sinks=None if sinks is None else sinks.data_ptr(), out=out.data_ptr(),
        lse=None if lse is None else lse.data_ptr(), num_runs=len(table), tokens=len(q), heads=q.shape[1],
        kv_heads=k.shape[1], window=look.window or 0, scale=look.scale, cap=look.cap or 0.0,
        is_bf16=q.dtype is torch.bfloat16, threads=torch.get_num_threads(),
    ), sinks  # fmt: skip


def _plain(x_THD: Tensor) -> Tensor:
    """The kernel reads the numbers of a head one after the other."""
    return x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()


def _rows(x_THD: Tensor) -> _Rows:
    return _Rows(x_THD.data_ptr(), x_THD.stride(0), x_THD.stride(1), x_THD.shape[-1])
