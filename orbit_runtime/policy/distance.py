"""The distance between two sets of hidden states as distributions over the vocabulary, one chunk of rows at a time.

Both are the model's own distributions, without the sampling temperature and truncation.

Legend: `R` targets, `N` hidden size, `V` vocabulary, `K` the teacher's likeliest tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orbit_runtime.algorithms.distillation import divergence, rest_of, split_off, spread_slopes
from orbit_runtime.policy.logprobs import CHUNK_ELEMENTS, Head

MODELS = 2
"""Number of models whose logits a chunk holds at the same time."""


@dataclass(frozen=True, slots=True)
class TeacherReport:
    """The report of an external teacher for each target: its likeliest tokens."""

    ids_RK: Tensor
    """int32."""
    logprobs_RK: Tensor
    """fp32."""

    def __getitem__(self, rows: slice | Tensor) -> TeacherReport:
        return TeacherReport(self.ids_RK[rows], self.logprobs_RK[rows])


@dataclass(frozen=True, slots=True)
class Measure:
    """A divergence and its support."""

    beta: float
    top_k: int | None = None
    """Number of tokens compared; None for the whole vocabulary."""


def _compared(
    logits_RV: Tensor, teacher: Tensor | TeacherReport, head: Head, measure: Measure
) -> tuple[Tensor, Tensor]:
    """`(values [R], slopes [R, V])` of one chunk. Args: teacher: its hidden states, or its report."""
    student_RV = torch.log_softmax(logits_RV.float(), dim=-1)
    if isinstance(teacher, TeacherReport):
        ids_RK = teacher.ids_RK.long()
        cells_RC = torch.cat([teacher.logprobs_RK, rest_of(teacher.logprobs_RK)], dim=-1)
    else:
        teacher_RV = torch.log_softmax(head(teacher).float(), dim=-1)
        if measure.top_k is None or measure.top_k >= teacher_RV.shape[-1]:
            return divergence(student_RV, teacher_RV, measure.beta)
        ids_RK = teacher_RV.topk(measure.top_k, dim=-1).indices
        cells_RC = split_off(teacher_RV, ids_RK)
    own_RC = split_off(student_RV, ids_RK)
    value_R, slopes_RC = divergence(own_RC, cells_RC, measure.beta)
    return value_R, spread_slopes(slopes_RC, student_RV, ids_RK, own_RC[:, -1:])


class _Distance(torch.autograd.Function):
    """Saves both sides' hidden states; backward recomputes each chunk's logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden_RN: Tensor, teacher: Tensor | TeacherReport, head: Head, measure: Measure, rows: int
    ) -> Tensor:
        values = [
            _compared(head(hidden_RN[part]), teacher[part], head, measure)[0] for part in _parts(len(hidden_RN), rows)
        ]
        ctx.save_for_backward(hidden_RN)
        ctx.settings = (teacher, head, measure, rows)
        return torch.cat(values) if values else hidden_RN.new_zeros(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor, None, None, None, None]:
        (hidden_RN,) = ctx.saved_tensors
        teacher, head, measure, rows = ctx.settings
        grad_hidden = torch.empty_like(hidden_RN)
        for part in _parts(len(hidden_RN), rows):
            with torch.enable_grad():
                hidden = hidden_RN[part].detach().requires_grad_(True)
                logits = head(hidden)
            _, slopes = _compared(logits.detach(), teacher[part], head, measure)
            slopes.mul_(grad_R[part, None])
            (grad_hidden[part],) = torch.autograd.grad(logits, hidden, slopes.to(logits.dtype))
        return grad_hidden, None, None, None, None


def _parts(count: int, rows: int) -> list[slice]:
    return [slice(start, start + rows) for start in range(0, count, rows)]


def token_distances(
    hidden_RN: Tensor,
    teacher: Tensor | TeacherReport,
    head: Head,
    measure: Measure,
    *,
    vocabulary: int,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """fp32 `[R]`: the divergence at each target. The head is frozen: gradients flow to `hidden` only.

    Args:
        teacher: its hidden states `[R, N]` at the same targets, for the same head; or its report.
    """
    rows = max(1, chunk_elements // (MODELS * vocabulary))
    return _Distance.apply(hidden_RN, teacher, head, measure, rows)  # type: ignore[no-any-return]
