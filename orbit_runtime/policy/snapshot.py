"""What a side computes on the way to its log-probs, and what it holds: taken where two sides disagree.

Belongs here: the snapshot, and taking the trainer's. Does not belong here: the engine's (`sglang_plugin.taps`),
comparing two of them (`parity.locate`).

Both sides use the names of the Hugging Face checkpoint. Legend: `T` tokens.
"""

from __future__ import annotations

from collections.abc import Buffer, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from orbit_runtime.adapters.layer import AdaptedLinear
from orbit_runtime.adapters.state import published_tensors
from orbit_runtime.adapters.tensorfile import tensor_digest
from orbit_runtime.policy.attention import Look
from orbit_runtime.policy.model import Policy
from orbit_runtime.policy.packed import Branch, PackedPlan
from orbit_runtime.quant.linear import FrozenLinear

TAPPED = (
    "embed_tokens", "input_layernorm", "q_proj", "k_proj", "v_proj", "o_proj", "post_attention_layernorm", "gate",
    "gate_proj", "up_proj", "down_proj", "norm",
)  # fmt: skip
"""Last parts of the modules whose results are points of a snapshot."""
ROTARY = "rotary angles"


@dataclass(frozen=True)
class Snapshot:
    """One sequence under one adapter, as one side sees it."""

    points: Mapping[str, Tensor]
    """fp32 `[T, …]` by name, in the order in which they were reached."""
    digests: Mapping[str, str]
    """Of every base and adapter tensor: of its values as BF16 where that is exact, else as fp32."""
    constants: Mapping[str, Tensor]
    """fp32: epsilons of norms, `rotary angles` `[T, D]` (cosines, then sines), bits of a router's results."""
    values: Callable[[Sequence[str]], Mapping[str, Tensor]] = field(repr=False)
    """The tensors behind some of the digests, asked for only where two sides differ."""


def take_snapshot(
    policy: Policy, token_ids_T: Sequence[int], adapter: str | None, files: Mapping[str, Buffer], *, copies: int = 1
) -> Snapshot:
    """The trainer's view of the sequence's first T - 1 tokens: the last one is nobody's input.

    Args:
        adapter: the slot that the pass applies; None: the bare base.
        files: the published adapter, whose tensors an engine must hold.
        copies: as many equal rows in one batch: another shape of the same work, for a floor.
    """
    points: dict[str, Tensor] = {}
    first, rest = tuple(token_ids_T[:1]), tuple(token_ids_T[1:])
    batch = policy.pack([Branch(number, first, rest) for number in range(copies)])
    rows = len(rest)
    decoder = str(policy.model.base_model_prefix)
    segments = adapter if copies == 1 else [(adapter, 0, copies * rows)]
    with torch.no_grad(), policy.injected.selection.use(segments), _tapped(policy.model, decoder, points, rows):
        plan = _TappedPlan(PackedPlan(batch, policy.kernel), f"{decoder}.layers", points, rows)
        policy.hidden(batch.token_ids_T[None], batch.position_T[None], plan)
    tensors = dict(_base_tensors(policy.model)) | published_tensors(files)
    if getattr(policy.model.config, "tie_word_embeddings", False):
        # One matrix under two names; the other side may know it under the first alone.
        tensors.pop("lm_head.weight", None)
    return Snapshot(
        points,
        {name: tensor_digest(read()) for name, read in _readers(tensors).items()},
        _constants(policy, decoder, rows),
        lambda names: {name: _readers(tensors)[name]().float().cpu() for name in names},
    )


def group_size_of(policy: Policy) -> int | None:
    """Columns of the packed base that share a scale, by the first packed layer; None: it has no such groups."""
    packed = (module.packed for module in policy.model.modules() if isinstance(module, FrozenLinear))
    sizes = (getattr(weight, "block_size", None) for weight in packed)
    return next((size for size in sizes if isinstance(size, int)), None)


@dataclass(frozen=True, slots=True)
class _TappedPlan:
    """A plan whose queries, keys and results are points as well."""

    plan: PackedPlan
    prefix: str
    points: dict[str, Tensor]
    rows: int

    @property
    def layout(self) -> tuple[int, int]:
        return self.plan.layout

    @property
    def longest(self) -> int:
        return self.plan.longest

    def attend(self, layer: int, q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, look: Look) -> Tensor:
        result = self.plan.attend(layer, q_1HTD, k_1KTD, v_1KTD, look)
        name = f"{self.prefix}.{layer}.self_attn"
        for part, tensor in (("query", q_1HTD), ("key", k_1KTD)):
            self.points[f"{name}.{part}"] = tensor[0, :, : self.rows].transpose(0, 1).flatten(1).float().cpu()
        self.points[f"{name}.attended"] = result[0, : self.rows].flatten(1).float().cpu()
        return result

    def attend_tokens(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, look: Look) -> Tensor:
        return self.plan.attend_tokens(layer, q_THD, k_TKD, v_TKD, look)


@contextmanager
def _tapped(model: nn.Module, decoder: str, points: dict[str, Tensor], rows: int) -> Iterator[None]:
    handles = []
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last in TAPPED and (last != "norm" or name == f"{decoder}.norm"):
            handles.append(module.register_forward_hook(_recorder(name, points, rows)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _recorder(name: str, points: dict[str, Tensor], rows: int) -> Callable[..., None]:
    def record(_: nn.Module, __: Any, result: Any) -> None:
        tensor = result[0] if isinstance(result, tuple) else result
        points[name] = tensor.reshape(-1, tensor.shape[-1])[:rows].float().cpu()

    return record


def _base_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor | FrozenLinear]]:
    """Every weight and bias of the base under its checkpoint's name; a packed one as its layer."""
    for name, module in model.named_modules():
        plain = name.removesuffix(".base")
        if isinstance(module, AdaptedLinear) or name.endswith("rotary_emb"):
            continue
        if isinstance(module, FrozenLinear):
            yield f"{plain}.weight", module
            if module.bias is not None:
                yield f"{plain}.bias", module.bias
            continue
        own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        yield from ((f"{plain}.{key}", tensor) for key, tensor in own.items() if tensor.is_floating_point())


def _readers(tensors: Mapping[str, Tensor | FrozenLinear]) -> dict[str, Callable[[], Tensor]]:
    """Packed weights are dequantised one at a time, when they are asked for."""
    return {
        name: (lambda held=held: held.dense(held.views(), torch.bfloat16) if isinstance(held, FrozenLinear) else held)
        for name, held in tensors.items()
    }


def _constants(policy: Policy, decoder: str, rows: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, module in policy.model.named_modules():
        eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
        if name.endswith("norm") and isinstance(eps, float):
            found[f"{name}.eps"] = torch.tensor(eps)
    rotary = getattr(getattr(policy.model, decoder), "rotary_emb", None)
    if rotary is not None:
        positions = torch.arange(rows, device=policy.device)[None]
        cos, sin = rotary(torch.empty(0, device=policy.device), positions)
        half = cos.shape[-1] // 2
        found[ROTARY] = torch.cat((cos[0, :, :half], sin[0, :, :half]), -1).float().cpu()
    return found
