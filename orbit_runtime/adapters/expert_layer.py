"""A layer of routed experts with adapter slots: shared by all experts, one for each, or shared on the outer side.

`SharedOuter` shares the side that faces the hidden state: LoRA's A of gate and up and B of down, OFT's R of gate and
up. A shared A or R is applied to each token once, before it is sent to its experts. Each expert's own is applied to its
slots in one product over all experts: no loop, nothing read by the host. The router runs earlier and is not affected.

Belongs here: dispatch from selection to maths, for experts, and products by expert with their gradients.
Does not belong here: the maths of one matrix (`lora`, `oft`), the order of tokens (the base's), files (`state`).

Legend: `T` tokens, `S` slots (a token at an expert, sorted by expert), `E` experts, `G` groups of one grouped product:
1 if experts share a parameter, otherwise E; weights `[G, K, N]`, `b` the size of OFT's blocks, `n = K / b` their count.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.files import expert_file_names, split_tensor
from orbit_runtime.adapters.layer import Segment, Selection, Slot, dropped, find_slot
from orbit_runtime.adapters.lora import LoRASlot
from orbit_runtime.adapters.oft import OFTSlot, rotate
from orbit_runtime.adapters.part import WHOLE, WeightPart
from orbit_runtime.quant.kernels import panels
from orbit_runtime.quant.kernels.dense import grouped_product

ALIGNMENT = 16
"""Bytes; a grouped product requires operand rows to be a multiple of this."""


class _Grouped(torch.autograd.Function):
    """`F.grouped_mm` with a backward that accepts gradients that are not contiguous."""

    @staticmethod
    def forward(ctx: Any, x_SK: Tensor, w_GKN: Tensor, offsets_G: Tensor) -> Tensor:
        ctx.save_for_backward(x_SK, w_GKN, offsets_G)
        return grouped_product(x_SK, w_GKN, offsets_G)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_SN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_SK, w_GKN, offsets_G = ctx.saved_tensors
        dy_SN = dy_SN.contiguous()
        dx = grouped_product(dy_SN, w_GKN.transpose(1, 2), offsets_G) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            # The gradient has the memory layout of the weights.
            turned = w_GKN.stride(1) == 1
            dw = F.grouped_mm(dy_SN.t(), x_SK, offs=offsets_G).transpose(1, 2) if turned else None
            dw = F.grouped_mm(x_SK.t(), dy_SN, offs=offsets_G) if dw is None else dw
        return dx, dw, None


def multiply_by_expert(x_SK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """`[S, N]`: `x[s] @ w[expert of s]`, in x's dtype.

    Args:
        offsets_E: int32; end of each expert's slots. Every slot belongs to an expert.
    """
    inner, outer = w_EKN.shape[1:]
    per_row = ALIGNMENT // x_SK.itemsize
    more_in, more_out = -inner % per_row, -outer % per_row
    if more_in or more_out:
        # Ranks below 16 bytes: padded with columns of zeros, which do not affect the product. The wider side is left
        # alone: padding it with nothing would copy it, forward and backward.
        wide_SK = F.pad(x_SK, (0, more_in)) if more_in else x_SK
        padded = multiply_by_expert(wide_SK, F.pad(w_EKN, (0, more_out, 0, more_in)), offsets_E)
        return padded[:, :outer] if more_out else padded
    result: Tensor = _Grouped.apply(x_SK.contiguous(), w_EKN, offsets_E)
    return result


def rotate_by_expert(x_SK: Tensor, R_Enbb: Tensor, offsets_E: Tensor) -> Tensor:
    """`[S, K]`: `x[s] @ blockdiag(R[expert of s])`; every block of every expert is a group of one product."""
    experts, blocks, size, _ = R_Enbb.shape
    slots = len(x_SK)
    first_n = torch.arange(blocks, device=x_SK.device, dtype=offsets_E.dtype)[:, None] * slots
    offsets_G = (first_n + offsets_E).view(-1)
    x_nSb = x_SK.view(slots, blocks, size).transpose(0, 1).reshape(blocks * slots, size)
    w_Gbb = R_Enbb.to(x_SK.dtype).transpose(0, 1).reshape(blocks * experts, size, size)
    turned = multiply_by_expert(x_nSb, w_Gbb, offsets_G)
    return turned.view(blocks, slots, size).transpose(0, 1).reshape(slots, blocks * size)


RUN_BYTES = 1 << 22
"""Bytes of fp32 masters: as many experts are built at a time if slots are built when a pass reaches the layer."""


class Slots(Protocol):
    """The order of slots, as defined by the base layer."""

    token_S: Tensor
    offsets_E: Tensor
    """int32; end of each expert's slots."""

    def gather(self, x_TK: Tensor, *, keep: bool = True) -> Tensor: ...

    def of(self, experts: slice) -> tuple[Slots, slice]:
        """The slots of these experts, and which of all slots they are."""


class AdaptedExpertLinear(nn.Module):
    """A projection of all experts of a layer, with the selected adapter applied."""

    def __init__(self, base: nn.Module, name: str, config: AdapterConfig, selection: Selection) -> None:
        super().__init__()
        self.base = base
        self.name = name
        self.config = config
        self.selection = selection
        self.in_features: int = base.in_features  # type: ignore[assignment]
        self.out_features: int = base.out_features  # type: ignore[assignment]
        self.num_experts: int = base.num_experts  # type: ignore[assignment]
        self.reads_tokens: bool = base.reads_tokens  # type: ignore[assignment]
        self.part: WeightPart = getattr(base, "part", None) or WeightPart(
            shape=(self.out_features, self.in_features), num_experts=self.num_experts, group="expert"
        )
        self.slots: dict[str, Slot] = {}
        self._held_names: dict[str, tuple[str, ...]] = {}
        self.shares_input = False
        """OFT: other layers have the same input and the same R."""

    @property
    def device(self) -> torch.device:
        return next(iter(self.base.buffers())).device

    def shapes(self, config: AdapterConfig | None = None) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole layer's parameters, by kind. `config`: of an adapter other than the policy's."""
        config = config or self.config
        outer = config.expert_layout == "SharedOuter"
        shared = config.expert_layout == "Shared"
        first = 1 if shared or (outer and self.reads_tokens) else self.part.num_experts
        last = 1 if shared or (outer and not self.reads_tokens) else self.part.num_experts
        if config.type == "LoRA":
            return {"lora_A": (first, config.rank, self.in_features), "lora_B": (last, self.out_features, config.rank)}
        size = config.block_size
        return {"oft_R": (first, self.in_features // size, size * (size - 1) // 2)}

    def file_names(self, kind: str) -> tuple[str, ...]:
        return expert_file_names(self.name, kind, self.config.expert_layout, self.part.num_experts)

    def held_names(self, kind: str) -> tuple[str, ...]:
        """File names for the experts that this process holds."""
        if kind not in self._held_names:
            names = self.file_names(kind)
            self._held_names[kind] = names[self.part.experts] if len(names) > 1 else names
        return self._held_names[kind]

    def named(self, slot: Slot, experts: slice = WHOLE) -> dict[str, Tensor]:
        """The slot's tensors by file name. Created once: a trace distinguishes tensors by identity."""
        if slot.named is None:
            names = {kind: self.held_names(kind) for kind in slot.tensors()}
            parts = (
                split_tensor(names[kind][experts] if len(names[kind]) > 1 else names[kind], tensor)
                for kind, tensor in slot.tensors().items()
            )
            slot.named = {name: tensor for part in parts for name, tensor in part.items()}
        return slot.named

    def slot(self, name: str, experts: slice = WHOLE) -> Slot:
        return find_slot(self, name, experts)

    def runs(self) -> list[slice]:
        """Slices of the experts that this process holds, a few at a time; a single one if they share files' tensors."""
        held = range(self.part.num_experts)[self.part.experts]
        if self.config.expert_layout != "PerExpert":
            return [WHOLE]
        config = self.config
        of_rank, of_blocks = config.rank * (self.in_features + self.out_features), config.block_size * self.in_features
        step = max(1, RUN_BYTES // (4 * (of_rank if config.type == "LoRA" else of_blocks)))
        return [slice(start, min(start + step, len(held))) for start in range(0, len(held), step)]

    def forward(self, x: Tensor, dispatch: Slots) -> Tensor:
        """`[S, N]` from x with one row per token if the base reads tokens, otherwise one per slot."""
        active = self.selection.active
        if active is None:
            return self.base(x, dispatch)  # type: ignore[no-any-return]
        runs: tuple[Segment, ...] = ((active, 0, -1),) if isinstance(active, str) else active
        if self.selection.by_layer is not None:
            return self._forward_in_runs(x, dispatch, runs)
        slots = [(self.slot(name), start, stop) for name, start, stop in runs if name is not None and stop != start]
        whole = isinstance(active, str)
        if self.config.type == "OFT":
            return self._forward_oft(x, dispatch, slots, whole)  # type: ignore[arg-type]
        y_SN: Tensor = self.base(x, dispatch)
        for slot, start, stop in slots:
            update_SN = self._update(x, slot, dispatch)  # type: ignore[arg-type]
            y_SN = y_SN + (update_SN if whole else update_SN * _within(dispatch, start, stop).to(update_SN.dtype))
        return y_SN

    def _forward_in_runs(self, x: Tensor, dispatch: Slots, segments: tuple[Segment, ...]) -> Tensor:
        """Few experts at a time, whose values are released before the next ones are built. Without gradient."""
        is_oft = self.config.type == "OFT"
        x_SK = x if not self.reads_tokens or not is_oft else dispatch.gather(x)
        result: Tensor = x_SK.clone() if is_oft else self.base(x, dispatch)
        for name, start, stop in segments:
            if name is None or stop == start:
                continue
            for experts in self.runs():
                slot = self.slot(name, experts)
                part, rows = dispatch.of(experts)
                own = x if self.reads_tokens else x[rows]
                changed = result[rows]
                if isinstance(slot, OFTSlot):
                    new = self._turned(own, slot, part)
                else:
                    new = changed + self._update(own, slot, part)
                is_all = isinstance(self.selection.active, str)
                result[rows] = new if is_all else torch.where(_within(part, start, stop), new, changed)
        return self.base.product(result, dispatch) if is_oft else result  # type: ignore[operator,no-any-return]

    def _update(self, x: Tensor, slot: LoRASlot, dispatch: Slots) -> Tensor:
        """`scaling * B A x` of every slot."""
        x = dropped(x, self)
        A, B = slot.lora_A.to(x.dtype), slot.lora_B.to(x.dtype)
        if len(A) == 1:
            h = panels.product(x, A[0])
            h_SR = dispatch.gather(h, keep=False) if self.reads_tokens else h
        else:
            x_SK = dispatch.gather(x) if self.reads_tokens else x
            h_SR = multiply_by_expert(x_SK, A.transpose(1, 2), dispatch.offsets_E)
        h_SR = h_SR * slot.scaling
        return panels.product(h_SR, B[0]) if len(B) == 1 else multiply_by_expert(h_SR, B.mT, dispatch.offsets_E)

    def _forward_oft(self, x: Tensor, dispatch: Slots, slots: list[tuple[OFTSlot, int, int]], whole: bool) -> Tensor:
        if whole:
            return self.base.product(self._turned(x, slots[0][0], dispatch), dispatch)  # type: ignore[operator,no-any-return]
        x_SK = dispatch.gather(x) if self.reads_tokens else x
        for slot, start, stop in slots:
            x_SK = torch.where(_within(dispatch, start, stop), self._turned(x, slot, dispatch), x_SK)
        return self.base.product(x_SK, dispatch)  # type: ignore[operator,no-any-return]

    def _turned(self, x: Tensor, slot: OFTSlot, dispatch: Slots) -> Tensor:
        """`[S, K]`: x R, computed once for neighbours that share x and R."""
        selection, version = self.selection, -1 if x.is_inference() else x._version
        newest = selection.rotated
        if newest is not None and newest[0] is x and newest[1] == version and newest[2] is slot.rotation:
            return newest[3]
        R = slot.rotation
        if len(R) == 1:
            turned = rotate(x, R[0])
            turned = dispatch.gather(turned, keep=False) if self.reads_tokens else turned
        else:
            turned = rotate_by_expert(dispatch.gather(x) if self.reads_tokens else x, R, dispatch.offsets_E)
        if self.shares_input:
            selection.rotated = (x, version, R, turned)
        return turned


def _within(dispatch: Slots, start: int, stop: int) -> Tensor:
    """`[S, 1]`: whether the slot's token is in this run of rows."""
    return ((dispatch.token_S >= start) & (dispatch.token_S < stop)).unsqueeze(1)
