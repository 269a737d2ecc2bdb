"""Gradient checkpointing of decoder layers: intermediate values are recomputed in the backward pass instead of kept.

What each mode keeps between the passes, in numbers per token and layer:

    None        all that autograd saves
    Selective   the layer's input, and the results of products with packed weights: `hidden * streams + sum of N` over
                its linears `[N, K]`; of routed experts gate and up, for each expert that the token goes to
    PerLayer    the layer's input, `hidden * streams`

`Selective` recomputes the rest: norms, rotary embedding, attention, activations, dropout, adapter products, the
experts' down projection; it is selective activation recomputation (Korthikanti et al., arXiv 2205.05198, section 5) for
a frozen base. `PerLayer` dequantises packed weights a second time, inside the layer. While a layer is recomputed, it
holds what `None` holds for that one layer.

Gradients are those of `None`, bit for bit as far as the same operations on the same numbers give the same bits: the
second pass applies what the first applied (adapter, dropout stream, given experts).
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
from orbit_runtime.quant.saved_products import SavedProducts

Recompute = Literal["None", "Selective", "PerLayer"]


class PassState(Protocol):
    """State that a pass depends on besides its tensors."""

    def remembered(self) -> Callable[[], AbstractContextManager[None]]:
        """A context that restores the state of the current pass."""


def recompute_layers(model: nn.Module, recompute: Recompute, states: Sequence[PassState]) -> None:
    """Makes the model recompute its decoder layers in every pass that records gradients.

    Uses transformers' own hook: a layer that is "training" passes its call to a function. Its submodules are not
    training, so nothing else changes.

    Raises:
        UnsupportedError: the model's layers have no such hook.
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
    contexts = partial(_contexts, again, SavedProducts() if recompute == "Selective" else None)
    return checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _contexts(
    again: list[Callable[[], AbstractContextManager[None]]], kept: SavedProducts | None
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of the first and the second pass."""
    return _entered([kept.keeping] if kept else []), _entered([*again, *([kept.taking] if kept else [])])


@contextmanager
def _entered(contexts: list[Callable[[], AbstractContextManager[None]]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield
