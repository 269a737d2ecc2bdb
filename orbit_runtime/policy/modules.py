"""Modules that are not linears: the embedding, norms in one kernel, what chooses keys, and the dtype between them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from orbit_runtime.policy.attention import decoder_of, layers_of
from orbit_runtime.quant.kernels import panels
from orbit_runtime.quant.linear import FrozenLinear


class FrozenEmbedding(nn.Module):
    """A look-up in the checkpoint's BF16 table `[V, N]`; rows are widened to the compute dtype afterwards."""

    def __init__(self, weight: torch.Tensor, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.compute_dtype = compute_dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight).to(self.compute_dtype)


class FusedRMSNorm(nn.Module):
    """`x / sqrt(mean(x²) + eps) * (weight + plus)` in one kernel instead of six."""

    def __init__(self, weight: torch.Tensor, eps: float, plus: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps, self.plus = eps, plus

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight + self.plus if self.plus else self.weight
        return F.rms_norm(x, weight.shape, weight, self.eps)


class _RowsApart(TorchFunctionMode):
    """Products and scores in which a row has the same bits whatever rows are beside it."""

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _APART.get(function, function)(*args, **kwargs or {})


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    y = panels.product(x, weight)
    return y if bias is None else y + bias


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """torch's of fp32 computes the last numbers of a tensor otherwise than the others; rounded, doubles are equal."""
    return x.double().sigmoid().to(x.dtype)


_APART: dict[Any, Callable[..., torch.Tensor]] = {F.linear: _linear, torch.Tensor.sigmoid: sigmoid}


def keep_rows_apart(model: nn.Module, device: torch.device, compute_dtype: torch.dtype) -> None:
    """Of the modules that are still transformers' own: routers, and linears that are not packed."""
    for module in model.modules() if device.type == "cpu" and panels.kernel(compute_dtype) is not None else ():
        if isinstance(module, nn.Linear) or hasattr(module, "top_k"):
            module.forward = partial(_forward_apart, module.forward)


def _forward_apart(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _RowsApart():
        return forward(*args, **kwargs)


def widen_linears(model: nn.Module, dtype: torch.dtype) -> None:
    """Holds dense weights of linears in `dtype`, and an embedding's table that is one of them, so that no pass casts or
    dequantises them again. Values stay the same.
    """
    widened: dict[int, torch.Tensor] = {}

    def wide(weight: torch.Tensor) -> torch.Tensor:
        return widened.setdefault(weight.data_ptr(), weight.to(dtype))

    for module in model.modules():
        if isinstance(module, FrozenLinear):
            module.widen(wide, dtype)
    for module in model.modules():
        if isinstance(module, FrozenEmbedding):
            module.weight = widened.get(module.weight.data_ptr(), module.weight)


def run_in_fp32(router: nn.Module) -> None:
    """Widens a router's first argument to fp32; its parameters are fp32 already, and so are its results."""
    router.register_forward_pre_hook(lambda _, args: (args[0].float(), *args[1:]))


def keep_stream_fp32(model: nn.Module, compute_dtype: torch.dtype) -> None:
    """Keeps the hidden states that decoder layers add to in fp32. Call it once adapters are injected.

    Norms of layers take fp32 and give `compute_dtype`; attention, feed-forward parts and rotary embeddings take and
    give `compute_dtype`, and what they give is widened by the addition. Gradients follow: that of the stream is fp32.
    """
    if compute_dtype is torch.float32:
        return
    layers = layers_of(model)
    # OPT's decoder is one module further in than that of the others.
    (decoder,) = (each for each in decoder_of(model).modules() if any(child is layers for child in each.children()))
    for owner in (decoder, *layers):
        for child in owner.children():
            kind = type(child).__name__.lower()
            if "norm" in kind:
                child.float().register_forward_pre_hook(_taking(torch.float32), with_kwargs=True)
                child.register_forward_hook(lambda _, __, result: result.to(compute_dtype))
            elif "rotary" in kind or (owner is not decoder and _multiplies(child)):
                child.register_forward_pre_hook(_taking(compute_dtype), with_kwargs=True)
    for layer in layers:
        layer.register_forward_pre_hook(_taking(torch.float32), with_kwargs=True)


def _multiplies(module: nn.Module) -> bool:
    """Whether it has linears, or experts that are parameters."""
    return any(hasattr(each, "in_features") for each in module.modules()) or any(
        each.dim() > 1 for each in module.parameters()
    )


def _taking(dtype: torch.dtype) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """A hook that casts the hidden states with which a module is called."""

    def cast(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not args and "hidden_states" in given:
            return args, given | {"hidden_states": given["hidden_states"].to(dtype)}
        return (*(each.to(dtype) for each in args[:1]), *args[1:]), given

    return cast


def fuse_norms(model: nn.Module) -> None:
    """Replaces RMS norms of Llama's form, and of Gemma's, which adds 1 to the weight, by the fused kernel.

    Only modules with the same fp32 result on a probe are replaced, so a norm with another formula under a similar name
    is left unchanged.
    """
    for name, module in list(model.named_modules()):
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = getattr(module, "weight", None)
        # A weight that is a buffer is not multiplied by, and may have another size than what is normed (FalconMamba).
        is_weight = isinstance(weight, nn.Parameter)
        if "RMSNorm" not in type(module).__name__ or eps is None or not is_weight or list(module.children()):
            continue
        if len(inspect.signature(module.forward).parameters) > 1:  # a gated norm
            continue
        probe = torch.linspace(-3.0, 3.0, 2 * weight.shape[-1], device=weight.device).view(2, -1)
        for fused in (FusedRMSNorm(weight.data, float(eps), plus) for plus in (0.0, 1.0)):
            if torch.allclose(fused(probe), module(probe), rtol=1e-6, atol=1e-6):
                model.set_submodule(name, fused)


SCORE_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
"""Most bytes of the scores by which keys are chosen, at a time: on a CPU they stay in the cache."""
SCORED_QUERIES = {"cpu": 32, "cuda": 64}
"""Queries that are scored at a time, against keys up to the last of them."""
INDEXER_ARGUMENTS = ["hidden_states", "q_resid", "position_embeddings", "attention_mask"]


def skip_indexers(model: nn.Module) -> None:
    """What chooses the keys that a query sees (DeepSeek-V3.2, GLM-5) computes nothing where it would choose all.
    Elsewhere it sees few sequences at a time: its scores are as large as those of an attention without a fused kernel.
    """
    for module in model.modules():
        forward: Any = type(module).forward
        if list(inspect.signature(forward).parameters)[1 : len(INDEXER_ARGUMENTS) + 1] == INDEXER_ARGUMENTS:
            forward = inspect.unwrap(forward)
            # The types differ in how they rotate queries and keys; a module has both functions.
            (name,) = (each for each in forward.__code__.co_names if each.startswith("apply_rotary"))
            module.forward = partial(_choose_keys, module.forward, module, forward.__globals__[name])


def _choose_keys(
    choose: Callable[..., torch.Tensor],
    indexer: Any,
    rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    position_embeddings: Any,
    attention_mask: torch.Tensor,
    *others: Any,
    past_key_values: Any = None,
) -> torch.Tensor:
    """Indices of the chosen keys. `past_key_values`: a cache that is to get keys to choose from."""
    if past_key_values is not None:
        given = (hidden_states, q_resid, position_embeddings, attention_mask, *others)
        return choose(*given, past_key_values=past_key_values)
    rows, queries, _ = hidden_states.shape
    keys = attention_mask.shape[-1]
    if keys <= indexer.index_topk:
        return torch.arange(keys, dtype=torch.int32, device=hidden_states.device).expand(rows, queries, -1)
    kind = hidden_states.device.type
    step = max(1, SCORE_BYTES[kind] // (4 * indexer.n_heads * min(queries, SCORED_QUERIES[kind]) * keys))
    given = (hidden_states, q_resid, position_embeddings, attention_mask)
    parts = (slice(start, start + step) for start in range(0, rows, step))
    chosen = [_best_keys(indexer, rotate, *(_part_of(each, part) for each in given)) for part in parts]
    return torch.cat(chosen)


@torch.no_grad()
def _best_keys(
    indexer: Any,
    rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    hidden_BSN: torch.Tensor,
    q_resid_BSN: torch.Tensor,
    cos_sin: tuple[torch.Tensor, torch.Tensor],
    mask_BQS: torch.Tensor,
) -> torch.Tensor:
    """int32 `[B, S, index_topk]`, as by the indexer's own code, which copies the keys for each query and scores those
    that none sees."""
    q_BSHD = indexer.wq_b(q_resid_BSN).unflatten(-1, (indexer.n_heads, -1))
    k_BS1D = indexer.k_norm(indexer.wk(hidden_BSN)).unsqueeze(2)
    sizes = [indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim]
    (q, q_rest), (k, k_rest) = q_BSHD.split(sizes, -1), k_BS1D.split(sizes, -1)
    q, k = rotate(q, k, *cos_sin, unsqueeze_dim=2)
    q_BSHD, k_BSD = torch.cat((q, q_rest), -1).float(), torch.cat((k, k_rest), -1).float().squeeze(2)
    weights_BSH = indexer.weights_proj(hidden_BSN.to(indexer.weights_proj.weight.dtype)).float()
    weights_BSH *= indexer.n_heads**-0.5 * indexer.softmax_scale
    mask_BQS = mask_BQS.expand(len(q_BSHD), -1, -1)
    chosen = []
    block = SCORED_QUERIES[q_BSHD.device.type]
    for part in (slice(start, start + block) for start in range(0, q_BSHD.shape[1], block)):
        mask = mask_BQS[:, part, : max(part.stop, indexer.index_topk)]
        scores = torch.bmm(q_BSHD[:, part].flatten(1, 2), k_BSD[:, : mask.shape[-1]].transpose(1, 2)).relu_()
        scores = scores.view(-1, indexer.n_heads, mask.shape[-1])
        index = torch.bmm(weights_BSH[:, part].reshape(len(scores), 1, -1), scores).view(len(mask), -1, mask.shape[-1])
        index = index.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else index + mask
        chosen.append(index.topk(indexer.index_topk, -1).indices.to(torch.int32))
    return torch.cat(chosen, 1)


def _part_of(given: Any, rows: slice) -> Any:
    """These rows of an argument, or of each in a tuple; what has one row is for all."""
    if isinstance(given, tuple):
        return tuple(_part_of(each, rows) for each in given)
    return given[rows] if len(given) > 1 else given
