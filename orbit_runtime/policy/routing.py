"""Experts that tokens go to: recorded while an engine samples, and given to a trainer that computes the same tokens.

A router that sees slightly different hidden states chooses other experts for some tokens, and the result differs by far
more than rounding. Given the engine's choice, the trainer weighs those experts by its own router's scores, so that
gradients still flow through the scores: router replay, R3 in arXiv 2510.11370, equations 4 and 5.

Legend: `T` tokens, `L` layers with routed experts, `C` experts that a token goes to, `E` experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from orbit_runtime.errors import InternalError
from orbit_runtime.policy.modules import sigmoid

GateWeights = Callable[[Any, Tensor, Tensor], Tensor]
"""(router, its logits `[T, E]`, experts `[T, C]`) → their weights `[T, C]`, as the router weighs its own choice."""
OWN_CHOICE = -1
"""Placeholder for an expert: the choice for this token is not known."""


class Routing:
    """The routers of one model, in the order of its layers. Each pass sees every token once, in one row."""

    def __init__(self, routers: dict[str, nn.Module], weigh: GateWeights) -> None:
        """Args: routers: by name; transformers' own, which return logits, weights and experts."""
        self.layers = tuple(int(name.split(".layers.")[1].split(".")[0]) for name in routers)
        """Indices of the layers with routed experts."""
        first = next(iter(routers.values()))
        self.experts_per_token = int(first.top_k)  # type: ignore[arg-type]
        self._weigh = weigh
        self._given_TLC: Tensor | None = None
        self._noted: dict[int, Tensor] | None = None
        self._preferred: dict[int, Tensor] | None = None
        self.meet: Callable[[Tensor], Tensor] = _same
        """Rows of this process's tokens → rows of all tokens that its routers see."""
        self.own: Callable[[Tensor], Tensor] = _same
        """The inverse of `meet`."""
        for place, router in enumerate(routers.values()):
            router.register_forward_hook(self._hook(place))

    @contextmanager
    def given(self, chosen_TLC: Tensor | None) -> Iterator[None]:
        """Within this context, passes over T tokens use these experts, and the routers' own choice for `OWN_CHOICE`."""
        before, self._given_TLC = self._given_TLC, chosen_TLC
        try:
            yield
        finally:
            self._given_TLC = before

    @contextmanager
    def noted(self) -> Iterator[Callable[[], Tensor]]:
        """Yields a function that returns the experts used by the newest pass, int16 `[T, L, C]` on the device."""
        before, self._noted = self._noted, {}
        try:
            yield partial(self._stacked, self._noted)
        finally:
            self._noted = before

    @contextmanager
    def preferred(self) -> Iterator[Callable[[], Tensor]]:
        """Like `noted`, for the experts that the routers would have chosen where others were given."""
        before, self._preferred = self._preferred, {}
        try:
            yield partial(self._stacked, self._preferred)
        finally:
            self._preferred = before

    def remembered(self) -> Callable[[], AbstractContextManager[None]]:
        """A context that restores the currently given experts and records none, for a layer's second pass."""
        return partial(self._again, self._given_TLC)

    @contextmanager
    def _again(self, chosen_TLC: Tensor | None) -> Iterator[None]:
        before = (self._given_TLC, self._noted, self._preferred)
        self._given_TLC, self._noted, self._preferred = chosen_TLC, None, None
        try:
            yield
        finally:
            self._given_TLC, self._noted, self._preferred = before

    def _stacked(self, held: dict[int, Tensor]) -> Tensor:
        return torch.stack([held[place] for place in range(len(self.layers))], 1)

    def _hook(self, place: int) -> Callable[..., Any]:
        def choose(router: nn.Module, _: Any, result: tuple[Tensor, Tensor, Tensor]) -> Any:
            if self._given_TLC is None and self._noted is None:
                return None
            logits, weights, chosen = result
            if self._preferred is not None and self._given_TLC is not None:
                self._preferred[place] = self.own(chosen).to(torch.int16)
            if self._given_TLC is not None:
                given_TC = self.meet(self._given_TLC[:, place].to(chosen.dtype))
                if given_TC.shape != chosen.shape:
                    raise InternalError(f"experts of {tuple(given_TC.shape)} were given to {tuple(chosen.shape)}")
                chosen = torch.where(given_TC == OWN_CHOICE, chosen, given_TC)
                weights = self._weigh(router, logits, chosen)
            if self._noted is not None:
                self._noted[place] = self.own(chosen).to(torch.int16)
            return logits, weights, chosen

        return choose


def _same(rows: Tensor) -> Tensor:
    return rows


def build_routing(model: nn.Module, weigh: GateWeights | None) -> Routing | None:
    """The model's routing; None if it has no routed experts, or its routers' weighting is unknown."""
    routers = {}
    for name, module in model.named_modules():
        router = getattr(module, "gate", None) or getattr(module, "router", None)
        if hasattr(module, "experts") and isinstance(router, nn.Module) and hasattr(router, "top_k"):
            routers[name] = router
    return Routing(routers, weigh) if routers and weigh is not None else None


def softmax_then_chosen(router: Any, logits_TE: Tensor, chosen_TC: Tensor) -> Tensor:
    """Qwen3-MoE: softmax in fp32 over all experts; the chosen ones' shares are normalised to sum to 1 if so
    configured."""
    weights_TC = torch.softmax(logits_TE, -1, dtype=torch.float32).gather(-1, chosen_TC)
    if router.norm_topk_prob:
        weights_TC = weights_TC / weights_TC.sum(-1, keepdim=True)
    return weights_TC.to(logits_TE.dtype)


def sigmoid_of_chosen(router: Any, logits_TE: Tensor, chosen_TC: Tensor) -> Tensor:
    """DeepSeek-V3 and GLM-4.5: sigmoid scores without the correction bias, which only affects the choice."""
    weights_TC = sigmoid(logits_TE).gather(-1, chosen_TC)
    if router.norm_topk_prob:
        weights_TC = weights_TC / (weights_TC.sum(-1, keepdim=True) + 1e-20)
    return weights_TC * router.routed_scaling_factor


def softmax_over_chosen(router: Any, logits_TE: Tensor, chosen_TC: Tensor) -> Tensor:
    """gpt-oss: softmax over the chosen experts' logits."""
    logits_TC = logits_TE.gather(-1, chosen_TC)
    return torch.softmax(logits_TC, -1, dtype=logits_TC.dtype)
