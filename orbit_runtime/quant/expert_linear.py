"""One projection of all routed experts as a module, and the order of tokens among experts.

Belongs here: dispatching tokens to all experts, or to those that this process holds; the frozen grouped layer with its
biases. Does not belong here: the product itself (`grouped`), routing, the activation between projections, adapters,
communication between processes that hold the other experts.

Legend: `T` tokens, `C` experts a token goes to, `S` slots (a token at an expert; `T·C` if all experts are held), `E`
experts, weights `[N, K]`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from orbit_runtime.quant.experts import ExpertStack
from orbit_runtime.quant.formats import FORMATS
from orbit_runtime.quant.grouped import grouped_linear


class _Gather(torch.autograd.Function):
    """Rows of tokens in slot order. Backward sums a token's slots in a fixed order; a scatter would not."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, token_S: Tensor, slot_of_TC: Tensor) -> Tensor:
        ctx.save_for_backward(slot_of_TC)
        return x_TK.index_select(0, token_S)

    @staticmethod
    def backward(ctx: Any, grad_SK: Tensor) -> tuple[Tensor, None, None]:
        (slot_of_TC,) = ctx.saved_tensors
        return grad_SK.index_select(0, slot_of_TC.view(-1)).unflatten(0, slot_of_TC.shape).sum(1), None, None


class _Combine(torch.autograd.Function):
    """Saves the slots in their own dtype; autograd would keep them widened, once for each of a token's experts."""

    @staticmethod
    def forward(ctx: Any, y_SN: Tensor, weight_TC: Tensor, slot_of_TC: Tensor, order_S: Tensor) -> Tensor:
        ctx.save_for_backward(y_SN, weight_TC, slot_of_TC, order_S)
        return torch.einsum("tcn,tc->tn", _by_token(y_SN, slot_of_TC), weight_TC.float())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        y_SN, weight_TC, slot_of_TC, order_S = ctx.saved_tensors
        dy_SN = dweight_TC = None
        if ctx.needs_input_grad[0]:
            dy_TCN = (grad_TN.unsqueeze(1) * weight_TC.float().unsqueeze(-1)).to(y_SN.dtype)
            dy_SN = dy_TCN.flatten(0, 1).index_select(0, order_S)
            if len(dy_SN) < len(y_SN):
                # Rows after the slots stand for values computed in other processes, and need no gradient.
                dy_SN = nn.functional.pad(dy_SN, (0, 0, 0, len(y_SN) - len(dy_SN)))
        if ctx.needs_input_grad[1]:
            dweight_TC = torch.einsum("tcn,tn->tc", _by_token(y_SN, slot_of_TC), grad_TN).to(weight_TC.dtype)
        return dy_SN, dweight_TC, None, None


def _by_token(y_SN: Tensor, slot_of_TC: Tensor) -> Tensor:
    """fp32 `[T, C, N]`."""
    return y_SN.index_select(0, slot_of_TC.view(-1)).unflatten(0, slot_of_TC.shape).float()


@dataclass(eq=False)
class Dispatch:
    """Slots sorted by expert, and by token within an expert. Built for one layer of one pass."""

    token_S: Tensor
    expert_S: Tensor
    slot_of_TC: Tensor
    """Indices of each token's slots."""
    order_S: Tensor
    """Index of each slot in `slot_of_TC`, flattened row by row."""
    offsets_E: Tensor
    """int32; end of each expert's slots."""
    _gathered: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    _ends: list[int] | None = field(default=None, repr=False)

    def of(self, experts: slice) -> tuple[Self, slice]:
        """The slots of these experts, and which of all slots they are. Not for gradients; reads sizes on the host."""
        if self._ends is None:
            self._ends = self.offsets_E.tolist()
        first, last, _ = experts.indices(len(self._ends))
        start, end = self._ends[first - 1] if first else 0, self._ends[last - 1]
        rows = slice(start, end)
        part = replace(
            self,
            token_S=self.token_S[rows],
            expert_S=self.expert_S[rows] - first,
            order_S=self.order_S[rows],
            offsets_E=self.offsets_E[experts] - start,
            _gathered=None,
            _ends=None,
        )
        return part, rows

    def gather(self, x_TK: Tensor, *, keep: bool = True) -> Tensor:
        """`[S, K]`. With `keep`, computed once for neighbours that read the same tensor."""
        if not keep:
            return _Gather.apply(x_TK, self.token_S, self.slot_of_TC)  # type: ignore[no-any-return]
        if self._gathered is None or self._gathered[0] is not x_TK:
            self._gathered = (x_TK, _Gather.apply(x_TK, self.token_S, self.slot_of_TC))
        return self._gathered[1]

    def combine(self, y_SN: Tensor, weight_TC: Tensor) -> Tensor:
        """fp32 `[T, N]`: the weighted sum of each token's experts, in the order in which the router listed them."""
        result: Tensor = _Combine.apply(y_SN, weight_TC, self.slot_of_TC, self.order_S)
        return result


def build_dispatch(expert_TC: Tensor, num_experts: int) -> Dispatch:
    """`expert_TC`: the experts that each token goes to. Without synchronising with the host."""
    flat = expert_TC.reshape(-1)
    expert_S, order_S = flat.sort(stable=True)
    slot_of = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(order_S), device=order_S.device))
    experts = torch.arange(num_experts, device=flat.device, dtype=flat.dtype)
    offsets_E = torch.searchsorted(expert_S, experts, right=True).to(torch.int32)
    token_S = order_S.div(expert_TC.shape[-1], rounding_mode="floor")
    return Dispatch(token_S, expert_S, slot_of.view(expert_TC.shape), order_S, offsets_E)


class FrozenExpertLinear(nn.Module):
    """`y[s] = x[s] @ W[expert of s].T + bias[expert of s]`, the packed tensors as buffers under their checkpoint names.

    Computes in `x.dtype`; `.to(dtype)` does not change packed tensors, as in `FrozenLinear`.
    """

    def __init__(self, stack: ExpertStack, bias_EN: Tensor | None = None, *, reads_tokens: bool) -> None:
        super().__init__()
        self.format = stack.format
        self.num_experts = stack.num_experts
        self.out_features, self.in_features = stack.shape
        self.reads_tokens = reads_tokens
        """Whether its input has one row per token (gate, up) rather than one per slot (down)."""
        self._packed_names = tuple(stack.tensors)
        for name, tensor in stack.tensors.items():
            self.register_buffer(name, tensor)
        self.register_buffer("bias", bias_EN)

    @property
    def stack(self) -> ExpertStack:
        """The weights of all experts; shares the buffers."""
        return ExpertStack(self.format, {name: self._buffers[name] for name in self._packed_names})  # type: ignore[misc]

    def forward(self, x: Tensor, dispatch: Dispatch) -> Tensor:
        return self.product(dispatch.gather(x) if self.reads_tokens else x, dispatch)

    def product(self, x_SK: Tensor, dispatch: Dispatch) -> Tensor:
        """`[S, N]`."""
        y_SN = grouped_linear(x_SK, self.stack, dispatch.offsets_E, keeps=self.reads_tokens)
        bias = self._buffers["bias"]
        return y_SN if bias is None else y_SN + bias.to(y_SN.dtype).index_select(0, dispatch.expert_S)

    def num_bytes(self) -> int:
        stack = self.stack
        return sum(FORMATS[self.format].num_bytes(stack.expert(index)) for index in range(self.num_experts))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenExpertLinear:
        for name, buffer in self._buffers.items():
            if buffer is not None:
                moved = fn(buffer)
                self._buffers[name] = moved if moved.dtype == buffer.dtype else buffer.to(moved.device)
        return self

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, experts={self.num_experts}"
        return f"{sizes}, format={self.format}, bias={self._buffers['bias'] is not None}"


class HeldDispatch(Dispatch):
    """A slot of an expert in another process points one row past the last; it reads 0 there."""

    def gather(self, x_TK: Tensor, *, keep: bool = True) -> Tensor:
        if keep and self._gathered is not None and self._gathered[0] is x_TK:
            return self._gathered[1]
        rows_SK = _GatherHeld.apply(x_TK, self.token_S, self.slot_of_TC)
        if keep:
            self._gathered = (x_TK, rows_SK)
        return rows_SK  # type: ignore[no-any-return]

    def combine(self, y_SN: Tensor, weight_TC: Tensor) -> Tensor:
        return super().combine(with_zero_row(y_SN), weight_TC)


class _GatherHeld(torch.autograd.Function):
    """`_Gather` for a subset of the slots."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x_TK: Tensor, token_S: Tensor, slot_of_TC: Tensor) -> Tensor:
        ctx.save_for_backward(slot_of_TC)
        return x_TK.index_select(0, token_S)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad_SK: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (slot_of_TC,) = ctx.saved_tensors  # type: ignore[attr-defined]
        rows = with_zero_row(grad_SK).index_select(0, slot_of_TC.view(-1))
        return rows.unflatten(0, slot_of_TC.shape).sum(1), None, None


def with_zero_row(rows: Tensor) -> Tensor:
    return torch.cat((rows, rows.new_zeros(1, rows.shape[1])))


def build_held_dispatch(expert_TC: Tensor, held: range) -> HeldDispatch:
    """Slots of the experts that this process holds.

    Args: expert_TC: indices among all experts of the layer, of which this process has `held`.
    """
    is_held = (expert_TC >= held.start) & (expert_TC < held.stop)
    whole = build_dispatch(torch.where(is_held, expert_TC - held.start, len(held)), len(held) + 1)
    # The number of slots determines the following sizes: the only value that the host reads here.
    slots = int(whole.offsets_E[-2])
    return HeldDispatch(
        whole.token_S[:slots],
        whole.expert_S[:slots],
        whole.slot_of_TC.clamp(max=slots),
        whole.order_S[:slots],
        whole.offsets_E[:-1],
    )
