"""Values that a side computes on the way to its log-probs, and the tensors it holds; taken when two sides disagree.

Belongs here: the snapshot, and taking the trainer's. Does not belong here: the engine's (`sglang_plugin.taps`),
comparing two snapshots (`parity.locate`).

Both sides use the names of the Hugging Face checkpoint. Legend: `T` tokens.
"""

from __future__ import annotations

from collections.abc import Buffer, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from orbit_runtime.adapters.expert_layer import AdaptedExpertLinear
from orbit_runtime.adapters.layer import AdaptedLinear
from orbit_runtime.adapters.state import published_tensors
from orbit_runtime.adapters.tensorfile import tensor_digest
from orbit_runtime.policy.attention import AttentionSettings
from orbit_runtime.policy.model import Policy
from orbit_runtime.policy.packed import Branch, PackedPlan, lay_out_experts
from orbit_runtime.policy.shares import BEFORE_LAYERS, Elsewhere
from orbit_runtime.quant.expert_linear import FrozenExpertLinear
from orbit_runtime.quant.formats import FORMATS
from orbit_runtime.quant.linear import FrozenLinear

TAPPED = (
    "embed_tokens", "input_layernorm", "q_proj", "k_proj", "v_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa",
    "o_proj", "post_attention_layernorm", "gate", "router", "gate_proj", "up_proj", "down_proj", "norm",
)  # fmt: skip
"""Last parts of the names of modules whose results are points of a snapshot; `mlp` is one if it routes to experts."""
ROTARY = "rotary angles"


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """The part of a tensor that one process holds: all of it, or a range along one axis."""

    digest: str
    """Digest of its values, as BF16 if that is exact, otherwise as fp32."""
    shape: tuple[int, ...]
    axis: int = 0
    start: int = 0
    """Start along `axis` in the whole tensor."""
    rank: int = 0


@dataclass(frozen=True)
class Snapshot:
    """One sequence under one adapter, as seen by one side."""

    points: Mapping[str, Tensor]
    """fp32 `[T, …]` by name, in the order in which they were reached."""
    tensors: Mapping[str, tuple[SnapshotPart, ...]]
    """Every base and adapter tensor; with several processes, the parts of each, copies included."""
    constants: Mapping[str, Tensor]
    """fp32: epsilons of norms, every layer's `rotary angles` `[T, D]` (cosines, then sines)."""
    values: Callable[[Sequence[str]], Mapping[str, tuple[Tensor, ...]]] = field(repr=False)
    """Returns the parts of the named tensors, in fp32 and in that order; called only if the two sides differ."""
    absent: tuple[str, ...] = ()
    """Modules that this side computes inside others, so that their results are not points."""
    routed_TLC: np.ndarray | None = None
    """int16, the experts that tokens were sent to; None if not recorded."""
    preferred_TLC: np.ndarray | None = None
    """int16, the experts that this side's routers would choose, if it was given `routed_TLC`."""


def take_snapshot(
    policy: Policy,
    token_ids_T: Sequence[int],
    adapter: str | None,
    files: Mapping[str, Buffer],
    *,
    copies: int = 1,
    routed_TLC: np.ndarray | None = None,
) -> Snapshot:
    """The trainer's view of the sequence's first T - 1 tokens: the last one is never an input.

    Args:
        adapter: the slot that the pass applies; None for the bare base.
        files: the published adapter, whose tensors an engine must hold.
        copies: number of equal rows in one batch, which gives another shape of the same work, for a floor; points only.
        routed_TLC: experts that tokens are sent to, as chosen by an engine; None if the routers choose.
    """
    rows = len(token_ids_T) - 1
    points, preferred = record(policy, token_ids_T, adapter, copies=copies, routed_TLC=routed_TLC)
    if copies > 1:
        return Snapshot(points, {}, {}, lambda _: {})
    tensors = dict(base_tensors(policy.model))
    if adapter is not None:
        tensors |= {name: partial(_same, tensor) for name, tensor in published_tensors(files).items()}
    return Snapshot(
        points,
        {name: (part_of(read()),) for name, read in tensors.items()},
        constants(policy, rows),
        lambda names: {name: (tensors[name]().float().cpu(),) for name in names},
        routed_TLC=routed_TLC,
        preferred_TLC=preferred,
    )


def record(
    policy: Policy, token_ids_T: Sequence[int], adapter: str | None, *, copies: int, routed_TLC: np.ndarray | None
) -> tuple[dict[str, Tensor], np.ndarray | None]:
    """The points of `take_snapshot`, and the experts that routers would have chosen where others were given."""
    points: dict[str, Tensor] = {}
    first, rest = tuple(token_ids_T[:1]), tuple(token_ids_T[1:])
    branches = [Branch(number, first, rest) for number in range(copies)]
    batch = policy.pack(branches)
    is_divided = batch.places_T is not None
    # A process with some of the tokens records all of its own: the joining process knows which are wanted.
    rows = len(batch.token_ids_T) if is_divided else len(rest)
    decoder = str(policy.model.base_model_prefix)
    segments = adapter if copies == 1 or is_divided else [(adapter, 0, copies * rows)]
    given = lay_out_experts(branches, [routed_TLC] * copies, batch)
    with (
        torch.no_grad(),
        policy.injected.selection.use(segments),
        _routed(policy, given) as preferred,
        _tapped(policy.model, decoder, points, rows),
    ):
        plan = _TappedPlan(policy.plan(batch), _latent_layers(policy.model), points, rows, decoder)
        policy.hidden(batch.token_ids_T[None], batch.position_T[None], plan)
    return points, preferred().cpu().numpy() if preferred else None


@contextmanager
def _routed(policy: Policy, given_TLC: Tensor | None) -> Iterator[Callable[[], Tensor] | None]:
    """Within this context tokens use the given experts; yields a function that returns the routers' own choice."""
    if policy.routing is None or given_TLC is None:
        yield None
        return
    with policy.routing.given(given_TLC), policy.routing.preferred() as preferred:
        yield preferred


def group_size_of(policy: Policy) -> int | None:
    """Columns of the packed base that share a scale, by the first packed layer; None if it has no such groups."""
    packed = (module.packed for module in policy.model.modules() if isinstance(module, FrozenLinear))
    sizes = (getattr(weight, "block_size", None) for weight in packed)
    return next((size for size in sizes if isinstance(size, int)), None)


@dataclass(frozen=True, slots=True)
class _TappedPlan:
    """A plan whose queries and keys are recorded as points."""

    plan: PackedPlan
    latent: frozenset[int]
    """Layers whose engines attend to latents, and therefore have different queries and keys."""
    points: dict[str, Tensor]
    rows: int
    decoder: str

    @property
    def layout(self) -> tuple[int, int]:
        return self.plan.layout

    @property
    def longest(self) -> int:
        return self.plan.longest

    def attend(self, layer: int, q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, look: AttentionSettings) -> Tensor:
        if layer not in self.latent:
            for part, tensor in (("query", q_1HTD), ("key", k_1KTD)):
                name = f"{self.decoder}.layers.{layer}.self_attn.{part}"
                self.points[name] = tensor[0, :, : self.rows].transpose(0, 1).flatten(1).float().cpu()
        return self.plan.attend(layer, q_1HTD, k_1KTD, v_1KTD, look)

    def attend_tokens(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, look: AttentionSettings) -> Tensor:
        return self.plan.attend_tokens(layer, q_THD, k_TKD, v_TKD, look)


def _latent_layers(model: nn.Module) -> frozenset[int]:
    return frozenset(
        int(name.split(".")[-3]) for name, _ in model.named_modules() if name.endswith(".self_attn.kv_b_proj")
    )


@contextmanager
def _tapped(model: nn.Module, decoder: str, points: dict[str, Tensor], rows: int) -> Iterator[None]:
    handles = []
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last == "o_proj":
            handles.append(module.register_forward_pre_hook(_entered(name, points, rows)))
        if ".experts." not in name and is_point(last, name == f"{decoder}.norm", hasattr(module, "experts")):
            handles.append(module.register_forward_hook(_recorder(name, points, rows)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def is_point(last: str, is_final_norm: bool, has_experts: bool) -> bool:
    """Whether the result of a module is a point.

    Args:
        last: the last part of its name.
    """
    return has_experts if last == "mlp" else last in TAPPED and (last != "norm" or is_final_norm)


def _entered(name: str, points: dict[str, Tensor], rows: int) -> Callable[..., None]:
    """Records the input of attention's output projection."""
    parent = name.rpartition(".")[0]

    def record(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        points[f"{parent}.attended"] = args[0].reshape(-1, args[0].shape[-1])[:rows].float().cpu()

    return record


def _recorder(name: str, points: dict[str, Tensor], rows: int) -> Callable[..., None]:
    def record(_: nn.Module, __: Any, result: Any) -> None:
        tensor = result[0] if isinstance(result, tuple) else result
        points[name] = tensor.reshape(-1, tensor.shape[-1])[:rows].float().cpu()

    return record


def base_tensors(model: nn.Module) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Every weight and bias of the base by checkpoint name. Packed ones are dequantised on request; of routed experts,
    one at a time and only those held by this process."""
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    for name, module in model.named_modules():
        plain = name.removesuffix(".base")
        if isinstance(module, (AdaptedLinear, AdaptedExpertLinear)) or name.endswith("rotary_emb"):
            continue
        if isinstance(module, FrozenExpertLinear):
            experts = plain.rpartition(".")[0]
            yield from _expert_tensors(plain, module, model.get_submodule(experts).held.start)  # type: ignore[union-attr,operator]
            continue
        if tied and plain == "lm_head":
            # One matrix with two names; the other side may have it only under the first.
            if not isinstance(model.get_input_embeddings(), Elsewhere):
                continue
            plain = f"{model.base_model_prefix}.{BEFORE_LAYERS}"
        if isinstance(module, FrozenLinear):
            yield f"{plain}.weight", partial(_dense, module)
            if module.bias is not None:
                yield f"{plain}.bias", partial(_same, module.bias)
            continue
        own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        for key, tensor in own.items():
            if tensor.is_floating_point():
                yield f"{plain}.{key}", partial(_same, tensor)


def _expert_tensors(name: str, module: FrozenExpertLinear, first: int) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    experts, _, projection = name.removesuffix(".base").rpartition(".")
    for index in range(module.num_experts):
        yield f"{experts}.{first + index}.{projection}.weight", partial(_dense_expert, module, index)
        if module.bias is not None:
            yield f"{experts}.{first + index}.{projection}.bias", partial(_same, module.bias[index])


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _dense(linear: FrozenLinear) -> Tensor:
    return linear.dense(linear.views(), torch.bfloat16)


def _dense_expert(linear: FrozenExpertLinear, index: int) -> Tensor:
    return FORMATS[linear.format].dequantize(linear.stack.expert(index))


def part_of(tensor: Tensor, axis: int = 0, start: int = 0, rank: int = 0) -> SnapshotPart:
    return SnapshotPart(tensor_digest(tensor), tuple(tensor.shape), axis, start, rank)


def constants(policy: Policy, rows: int) -> dict[str, Tensor]:
    """Args: rows: number of positions of the rotary angles."""
    decoder = str(policy.model.base_model_prefix)
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
        angles = torch.cat((cos[0, :, :half], sin[0, :, :half]), -1).float().cpu()
        names = (name for name, _ in policy.model.named_modules() if name.endswith(".self_attn"))
        found |= {f"{name}.{ROTARY}": angles for name in names}
    return found
