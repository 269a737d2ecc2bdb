"""Gradient checkpointing of decoder layers: what the backward pass needs is computed again instead of kept.

What each keeps between the passes, in numbers for each token and layer:

    None        all that autograd saves
    Selective   the layer's input, and what products with packed weights gave: `hidden * streams + sum of N` over its
                linears `[N, K]`, of routed experts those of gate and up, for each that the token goes to
    PerLayer    the layer's input, `hidden * streams`

`Selective` computes the rest again: norms, rotary embedding, attention, activations, dropout, adapters' products, the
experts' down projection; it is selective activation recomputation (Korthikanti et al., arXiv 2205.05198, section 5) for
a frozen base. `PerLayer` dequantises packed weights a second time, inside the layer. While a layer is computed again it
holds what `None` holds for that one layer.

Gradients are those of `None`, bit for bit where the same operations on the same numbers give the same bits: the second
pass applies what the first applied (adapter, dropout's stream, given experts).

Belongs here: which passes run twice and what the second is told. Does not belong here: keeping products (`quant.kept`),
bytes (`planner.activations`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from orbit_runtime.errors import UnsupportedError
from orbit_runtime.quant.kept import Kept

Recompute = Literal["None", "Selective", "PerLayer"]


class PassState(Protocol):
    """What a pass goes by besides its tensors."""

    def remembered(self) -> Callable[[], AbstractContextManager[None]]:
        """A context in which the pass that is under way now goes on."""
        ...


def recompute_layers(model: nn.Module, recompute: Recompute, states: Sequence[PassState]) -> None:
    """From now on the model's decoder layers are computed again wherever a pass records gradients.

    Through transformers' own door: a layer that is "training" hands its call to a function. Its modules are not
    training, so that nothing else changes.

    Raises:
        UnsupportedError: the model's layers have no such door.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers and recompute != "None":
        raise UnsupportedError(
            f"the layers of {type(model).__name__} cannot be computed again",
            where="spec.training.recompute",
            fix="set it to None",
        )
    run = partial(_run, recompute, states)
    for layer in layers:
        layer.gradient_checkpointing = layer.training = recompute != "None"
        layer._gradient_checkpointing_func = run


def _run(
    recompute: Recompute,
    states: Sequence[PassState],
    layer: Callable[..., Any],
    *args: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return layer(*args)
    again = [state.remembered() for state in states]
    contexts = partial(_contexts, again, Kept() if recompute == "Selective" else None)
    return checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _contexts(
    again: list[Callable[[], AbstractContextManager[None]]], kept: Kept | None
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Of the first pass and of the second."""
    return _entered([kept.keeping] if kept else []), _entered([*again, *([kept.taking] if kept else [])])


@contextmanager
def _entered(contexts: list[Callable[[], AbstractContextManager[None]]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield
