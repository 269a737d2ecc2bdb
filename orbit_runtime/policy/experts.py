"""The routed experts of a layer over packed weights: tokens sorted by expert, one projection of all experts at a time.

Legend: `T` tokens, `C` experts a token goes to, `S = T·C` slots, `N` hidden size, `I` inner size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from orbit_runtime.quant.expert_linear import FrozenExpertLinear, build_dispatch, build_held_dispatch

Activation = Callable[[Tensor, Tensor | None], Tensor]
"""(output of gate, of up) → `[S, I]`; if one projection is all there is, (its output, None)."""


class FrozenExperts(nn.Module):
    """Replaces transformers' `…Experts`: the same call, the same values.

    Saved for backward are packed weights, activations and the dispatch; backward dequantises each expert again.
    """

    def __init__(
        self, linears: Mapping[str, FrozenExpertLinear], activation: Activation, held: range | None = None
    ) -> None:
        """`linears`: `gate_proj` and `up_proj`, or `gate_up_proj`, or `up_proj`, and `down_proj`, for experts `held`
        (None: all)."""
        super().__init__()
        part = getattr(linears["down_proj"], "part", None)
        self.num_experts = part.num_experts if part else linears["down_proj"].num_experts
        self.held = held if held is not None else range(self.num_experts)
        self.activation = activation
        for name, linear in linears.items():
            self.add_module(name, linear)

    def forward(self, hidden_TN: Tensor, expert_TC: Tensor, weight_TC: Tensor) -> Tensor:
        """`[T, N]`, summed in fp32 in the router's order, over the experts that this process holds."""
        if len(self.held) == self.num_experts:
            dispatch = build_dispatch(expert_TC, self.num_experts)
        else:
            dispatch = build_held_dispatch(expert_TC, self.held)
        modules = self._modules
        if "gate_proj" not in modules:
            (single,) = modules.keys() - {"down_proj"}
            inner_SI = self.activation(modules[single](hidden_TN, dispatch), None)  # type: ignore[misc]
        else:
            gate_SI = modules["gate_proj"](hidden_TN, dispatch)  # type: ignore[misc]
            inner_SI = self.activation(gate_SI, modules["up_proj"](hidden_TN, dispatch))  # type: ignore[misc]
        return dispatch.combine(modules["down_proj"](inner_SI, dispatch), weight_TC).to(hidden_TN.dtype)  # type: ignore[misc]


def gated(act: Callable[[Tensor], Tensor], limit: float | None = None) -> Activation:
    """`act(gate) * up`; with a limit both are clamped first, the gate only from above (DeepSeek-V4)."""

    def activation(gate_SI: Tensor, up_SI: Tensor | None) -> Tensor:
        assert up_SI is not None
        if limit is not None:
            gate_SI, up_SI = gate_SI.clamp(max=limit), up_SI.clamp(min=-limit, max=limit)
        return act(gate_SI) * up_SI

    return activation


def interleaved(alpha: float, limit: float) -> Activation:
    """gpt-oss: rows of gate and up alternate; `(up + 1) * gate * sigmoid(alpha * gate)` after clamping both."""

    def activation(gate_up_SI: Tensor, _: Tensor | None) -> Tensor:
        gate_SI = gate_up_SI[..., ::2].clamp(max=limit)
        up_SI = gate_up_SI[..., 1::2].clamp(min=-limit, max=limit)
        return (up_SI + 1) * gate_SI * torch.sigmoid(gate_SI * alpha)

    return activation
