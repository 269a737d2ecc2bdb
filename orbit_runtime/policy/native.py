"""Attention and the small steps of a decoder on a CPU by Orbit's own kernels, `attention.c` and `steps.c`.

Belongs here: calling them. Does not belong here: which passes use them (`packed`, `gradients`, `logprobs`,
`rollout.cache`, `rollout.sampling`).

Legend: see `chunked`; `R` runs of tokens (`packed.Row`), or rows of logits; `N` hidden size, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, Structure, byref, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from orbit_runtime.policy.attention import AttentionSettings
from orbit_runtime.quant.kernels.compiled import compiled
from orbit_runtime.quant.kernels.panels import plain

SOURCE = Path(__file__).with_name("attention.c")
STEPS = Path(__file__).with_name("steps.c")


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


@cache
def kernel() -> CDLL | None:
    found = compiled(SOURCE)
    if found is not None:
        found.keep.argtypes = [*[c_void_p] * 3, *[c_int64] * 5]
    return found


def can_attend(q: Tensor) -> bool:
    """Whether the kernel takes queries like these."""
    return q.device.type == "cpu" and q.dtype in {torch.float32, torch.bfloat16} and kernel() is not None


def table_of(runs: Sequence[tuple[int, int, int, int, int, int]]) -> np.ndarray:
    """int64 `[R, 7]`, as the kernel reads it, of runs with the fields of `Row` in their order."""
    table_R7 = np.full((len(runs), 7), -1)
    table_R7[:, :6] = runs
    newest: dict[int, int] = {}
    for number, run in enumerate(runs):
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


def keep(cache_BKSD: Tensor, new_BKD: Tensor, positions_B: np.ndarray) -> None:
    """Writes each row's newest keys, or values, to their place, int64, in the first rows of a cache."""
    new_BKD, (_, heads, size) = _heads(new_BKD), new_BKD.shape
    places = cache_BKSD.data_ptr(), new_BKD.data_ptr(), positions_B.ctypes.data
    sizes = (
        len(new_BKD),
        heads,
        cache_BKSD.stride(1) // size,
        *(each * new_BKD.itemsize for each in (size, new_BKD.stride(0))),
    )
    kernel().keep(*places, *sizes)  # type: ignore[union-attr]


def attend(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, table_R7: np.ndarray, look: AttentionSettings, lse_HT: Tensor | None
) -> Tensor:
    """`[T, H, D of v]`; writes the log of each query's sum of exponentials, fp32, where it is asked for."""
    q_THD, k_TKD, v_TKD = map(plain, (q_THD, k_TKD, v_TKD))
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
    q_THD, k_TKD, v_TKD, dout_THD = map(plain, (q_THD, k_TKD, v_TKD, dout_THD))
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


# --- steps ---


class _Turn(Structure):
    """`Turn` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "grad", "weight", "cos", "sin", "scale", "out")),
        *((name, c_int64) for name in ("x_row", "grad_row", "tokens", "heads", "size")),
        ("eps", c_float),
        *((name, c_int32) for name in ("is_bf16", "threads")),
    )


@cache
def steps() -> CDLL | None:
    found = compiled(STEPS)
    if found is not None:
        places, sizes, end = [c_void_p] * 6, [c_int64] * 2, [c_int32] * 2
        found.normed.argtypes = [*places, c_float, *sizes, *end]
        found.normed_backward.argtypes = [*places, c_void_p, *sizes, *end]
        found.gated.argtypes = [*places[:2], *sizes, *end]
        found.gated_backward.argtypes = [*places[:3], *sizes, *end]
        found.scored.argtypes = [c_void_p, c_int64, *places[:3], c_int32, *sizes, c_int32]
        found.drawn.argtypes = [c_void_p, c_int64, *places[:3], *sizes, c_int32]
    return found


def can_step(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels take numbers like these, and give such of this dtype."""
    return x.device.type == "cpu" and {x.dtype, dtype} <= {torch.float32, torch.bfloat16} and steps() is not None


def normed(
    x_TN: Tensor, y_TN: Tensor | None, weight_N: Tensor, eps: float, dtype: torch.dtype, *, in_place: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `gradients.normed`; also 1 / sqrt(mean(sum²) + eps) `[T]`. Args: in_place: the sum takes the place of x."""
    sums = x_TN if in_place or y_TN is None else torch.empty_like(x_TN)
    out, scale = x_TN.new_empty(x_TN.shape, dtype=dtype), x_TN.new_empty(len(x_TN))
    places = (_at(each) for each in (x_TN, y_TN, weight_N, sums, out, scale))
    steps().normed(*places, eps, *x_TN.shape, *_how(dtype))  # type: ignore[union-attr]
    return sums, out, scale


def normed_gradients(
    sums_TN: Tensor, weight_N: Tensor, scale_T: Tensor, of_sums: Tensor | None, of_out: Tensor, *, adds: bool
) -> tuple[Tensor, Tensor | None]:
    """Those of x and, if there was one, of y."""
    of_out, of_sums = of_out.contiguous(), None if of_sums is None else of_sums.contiguous()
    of_x, of_y = torch.empty_like(sums_TN), torch.empty_like(of_out) if adds else None
    places = (_at(each) for each in (sums_TN, weight_N, scale_T, of_sums, of_out, of_x, of_y))
    steps().normed_backward(*places, *sums_TN.shape, *_how(of_out.dtype))  # type: ignore[union-attr]
    return of_x, of_y


def turned(
    x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, weight_HD: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """See `gradients.turned`; also 1 / sqrt(mean(x²) + eps) of each head, `[T, H]`, where they are normed."""
    scale_TH = None if weight_HD is None else weight_HD.new_empty(x_THD.shape[:2])
    return _turn("turned", x_THD, None, cos_T1D, sin_T1D, weight_HD, scale_TH, eps), scale_TH


def turned_gradient(
    x_THD: Tensor, grad_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, weight_HD: Tensor | None, scale_TH: Tensor | None
) -> Tensor:
    return _turn("turned_backward", x_THD, grad_THD, cos_T1D, sin_T1D, weight_HD, scale_TH, 0.0)


def _turn(
    name: str, x: Tensor, grad: Tensor | None, cos: Tensor, sin: Tensor, weight: Tensor | None, scale: Tensor | None,
    eps: float,
) -> Tensor:  # fmt: skip
    x, grad = _heads(x), None if grad is None else _heads(grad)
    out = x.new_empty(x.shape)
    places = (_at(each) for each in (x, grad, weight, cos, sin, scale, out))
    strides = x.stride(0), 0 if grad is None else grad.stride(0)
    getattr(steps(), name)(byref(_Turn(*places, *strides, *x.shape, eps, *_how(x.dtype))))
    return out


def gated(both_TN: Tensor, grad_TN: Tensor | None = None) -> Tensor:
    """See `gradients.gated`; given the gradient of its result, that of both."""
    both_TN, (rows, size) = both_TN.contiguous(), both_TN.shape
    sizes = rows, size // 2, *_how(both_TN.dtype)
    if grad_TN is None:
        out = both_TN.new_empty(rows, size // 2)
        steps().gated(_at(both_TN), _at(out), *sizes)  # type: ignore[union-attr]
    else:
        out, grad_TN = torch.empty_like(both_TN), grad_TN.contiguous()
        steps().gated_backward(*map(_at, (both_TN, grad_TN, out)), *sizes)  # type: ignore[union-attr]
    return out


def scored(logits_RV: Tensor, targets_R: Tensor, *, entropies: bool, slopes: bool = False) -> tuple[Tensor, Tensor]:
    """Log-probs of targets and, where asked for, entropies; logits become the slopes of the log-probs, negated, where
    those are asked for."""
    assert (logits_RV.dtype, logits_RV.stride(1)) == (torch.float32, 1), "they are read, and replaced, where they lie"
    targets_R = targets_R.contiguous()
    logprobs_R, entropies_R = (logits_RV.new_empty(count) for count in (len(logits_RV), len(logits_RV) * entropies))
    places = _at(targets_R), _at(logprobs_R), _at(entropies_R) if entropies else None
    rows = logits_RV.stride(0), *places, slopes, *logits_RV.shape, torch.get_num_threads()
    steps().scored(_at(logits_RV), *rows)  # type: ignore[union-attr]
    return logprobs_R, entropies_R


def drawn(logits_RV: Tensor, uniforms_R: Tensor) -> tuple[Tensor, Tensor]:
    """A token of each row with its log-prob, by inverse CDF; the most probable one for a uniform below 0."""
    assert (logits_RV.dtype, uniforms_R.dtype) == (torch.float32, torch.float64)
    logits_RV, uniforms_R = plain(logits_RV), uniforms_R.contiguous()
    tokens_R, logprobs_R = torch.empty(len(logits_RV), dtype=torch.long), logits_RV.new_empty(len(logits_RV))
    places = map(_at, (uniforms_R, tokens_R, logprobs_R))
    rows = logits_RV.stride(0), *places, *logits_RV.shape, torch.get_num_threads()
    steps().drawn(_at(logits_RV), *rows)  # type: ignore[union-attr]
    return tokens_R, logprobs_R


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _how(dtype: torch.dtype) -> tuple[bool, int]:
    return dtype is torch.bfloat16, torch.get_num_threads()


def _heads(x_THD: Tensor) -> Tensor:
    """A token's heads one after the other."""
    return x_THD if x_THD.stride()[1:] == (x_THD.shape[2], 1) else x_THD.contiguous()


def _rows(x_THD: Tensor) -> _Rows:
    return _Rows(x_THD.data_ptr(), x_THD.stride(0), x_THD.stride(1), x_THD.shape[-1])
