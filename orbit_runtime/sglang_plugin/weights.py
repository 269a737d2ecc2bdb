"""The base weights of one rank of a server, by checkpoint name and by position in whole tensors.

Belongs here: how SGLang names, fuses, divides and packs weights. Does not belong here: adapters (`readback`), passes
(`taps`).

A packed layer is read by multiplying with it: a row of the identity gives a column of what its kernel dequantises,
whatever the order of its bytes. That is exact if activations stay in 16 bits (each sum is one value times 1). Kernels
that also quantise activations, and packed routed experts, are not reported.
Packed layers run on GPUs only: not run on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from orbit_runtime.sglang_plugin.rotation import FUSED

PROBED_ROWS = 256
"""Rows of the identity per product."""
WEIGHT_ONLY = ("Marlin", "WNA16")
"""Parts of the names of SGLang's methods that dequantise weights and do not change activations."""
KINDS = ("weight", "bias", "e_score_correction_bias")
LATENT = "kv_b_proj"
"""Held as the two matrices by which queries and attended latents are multiplied, `w_kc` and `w_vc`."""


@dataclass(frozen=True, eq=False)
class HeldTensor:
    """All of a tensor, or a range along one axis."""

    name: str
    read: Callable[[], Tensor]
    """Computed on each call if it is packed."""
    axis: int = 0
    start: int = 0
    """Start in the whole tensor."""


@dataclass(frozen=True)
class RowRange:
    """Rows `[first, first + count)` of a layer: all rows of one of the checkpoint's layers, or a range of them."""

    name: str
    first: int
    count: int
    start: int
    """Start in the checkpoint's layer."""

    def of(self, tensor: Tensor) -> Tensor:
        return tensor[self.first : self.first + self.count]


def base_weights(model: Any) -> Iterator[HeldTensor]:
    """Weights of this rank. Those that cannot be read are left out, and the client names them."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        plain = name.removesuffix(".base_layer")
        parent = modules.get(plain.rpartition(".")[0])
        if hasattr(module, "w13_weight"):
            yield from _experts(plain, module)
        elif getattr(module, "w_kc", None) is not None:
            yield from _latent(plain, module)
        elif is_packed(module):
            yield from _packed(plain, module, parent)
        elif not (plain.endswith(f".{LATENT}") and getattr(parent, "w_kc", None) is not None):
            yield from _plain(plain, module, parent)


def dense(apply: Callable[[Tensor], Tensor], in_features: int, *, dtype: torch.dtype, device: Any) -> Tensor:
    """`[N, K]` of a layer `y = x @ W.T` without bias, from the layer itself.

    Args:
        apply: `[rows, K]` → `[rows, N]`.
    """
    columns = []
    for start in range(0, in_features, PROBED_ROWS):
        x = torch.zeros(min(PROBED_ROWS, in_features - start), in_features, dtype=dtype, device=device)
        x.diagonal(start).fill_(1.0)
        columns.append(apply(x).t())
    return torch.cat(columns, 1)


def is_packed(module: Any) -> bool:
    """Whether it is a linear whose `weight`, if any, does not hold its values."""
    method = type(getattr(module, "quant_method", None)).__name__
    return hasattr(module, "input_size") and method != "NoneType" and not method.startswith("Unquantized")


def rows_of(name: str, module: Any, total: int, parent: Any) -> list[RowRange]:
    """Rows of each of the checkpoint's layers that this one combines.

    Args:
        module: one of SGLang's linears or embeddings, or any other module, which is whole.
        total: number of rows that it has on this rank.
        parent: the module that it is a part of.
    """
    owner, _, last = name.rpartition(".")
    parts = FUSED.get(last, (last,))
    heights, places = heights_of(module, total, parts, parent), places_of(module, len(parts))
    first, found = 0, []
    for part, height, place in zip(parts, heights, places, strict=True):
        found.append(RowRange(f"{owner}.{part}" if owner else part, first, height, place * height))
        first += height
    indices = getattr(module, "shard_indices", None)
    if indices is None:
        return found
    return [RowRange(found[0].name, 0, indices.num_org_elements, indices.org_vocab_start_index)]


def heights_of(module: Any, total: int, parts: tuple[str, ...], parent: Any) -> list[int]:
    """Rows of a layer, or features of its result, that belong to each of the checkpoint's layers on this rank."""
    base = getattr(module, "base_layer", module)
    if parts[0] == "q_a_proj" and len(parts) == 2:
        first = int(parent.q_lora_rank)
        return [first, total - first]
    if len(parts) == 3:
        return [base.q_proj_shard_size, base.kv_proj_shard_size, base.kv_proj_shard_size]
    return [total // len(parts)] * len(parts)


def places_of(module: Any, count: int) -> list[int]:
    """For each of `count` fused layers, the index of this rank's range of rows, in units of its size; 0 if it has all
    of them.
    """
    from sglang.srt.distributed.utils import get_group_rank_size
    from sglang.srt.layers.linear import ColumnParallelLinear

    base = getattr(module, "base_layer", module)
    if not isinstance(base, ColumnParallelLinear):
        return [0] * count
    place, _ = get_group_rank_size(base.tp_group)
    # Queries come first; neighbours may share a key/value head.
    return [place, *[place // (base.num_kv_head_replicas if count == 3 else 1)] * (count - 1)]


def _columns_start(module: Any) -> int:
    """First column of a layer whose input is divided."""
    from sglang.srt.distributed.utils import get_group_rank_size
    from sglang.srt.layers.linear import RowParallelLinear

    if not isinstance(module, RowParallelLinear):
        return 0
    place, _ = get_group_rank_size(module.tp_group)
    return int(place * module.input_size_per_partition)


def _is_cut_by_columns(module: Any) -> bool:
    from sglang.srt.layers.linear import RowParallelLinear

    return isinstance(module, RowParallelLinear)


def _plain(name: str, module: Any, parent: Any) -> Iterator[HeldTensor]:
    own: Mapping[str, Tensor] = {
        **dict(module.named_parameters(recurse=False)),
        **dict(module.named_buffers(recurse=False)),
    }
    for kind, tensor in own.items():
        if kind not in KINDS or not tensor.is_floating_point():
            continue
        by_columns = kind == "weight" and _is_cut_by_columns(module)
        for rows in rows_of(name, module, tensor.shape[0], parent):
            read = partial(rows.of, tensor.detach())
            start = _columns_start(module) if by_columns else rows.start
            yield HeldTensor(f"{rows.name}.{kind}", read, int(by_columns), start)


def _packed(name: str, module: Any, parent: Any) -> Iterator[HeldTensor]:
    scheme = getattr(module, "scheme", None) or module.quant_method
    if any(part in type(each).__name__ for each in (module.quant_method, scheme) for part in WEIGHT_ONLY):
        total = getattr(module, "output_size_per_partition", module.output_size)
        by_columns = _is_cut_by_columns(module)
        for rows in rows_of(name, module, total, parent):
            start = _columns_start(module) if by_columns else rows.start
            yield HeldTensor(f"{rows.name}.weight", partial(_probe, module, rows), int(by_columns), start)
    if getattr(module, "bias", None) is not None:
        for rows in rows_of(name, module, module.bias.shape[0], parent):
            yield HeldTensor(f"{rows.name}.bias", partial(rows.of, module.bias.detach()), 0, rows.start)


def _probe(module: Any, rows: RowRange) -> Tensor:
    features = getattr(module, "input_size_per_partition", module.input_size)
    device = next(iter(module.parameters())).device

    def apply(x: Tensor) -> Tensor:
        return rows.of(module.quant_method.apply(module, x, None).t()).t()

    with torch.no_grad():
        return dense(apply, features, dtype=module.params_dtype, device=device)


def _latent(name: str, attention: Any) -> Iterator[HeldTensor]:
    """`[H·(nope + v), R]` of this rank's heads, assembled from the matrices that the passes use."""
    from sglang.srt.distributed.utils import get_group_rank_size

    keys_HNR, values_HRV = attention.w_kc, attention.w_vc
    if not (keys_HNR.is_floating_point() and keys_HNR.element_size() > 1):
        return

    def read() -> Tensor:
        return torch.cat((keys_HNR, values_HRV.transpose(1, 2)), 1).flatten(0, 1)

    place, _ = get_group_rank_size(getattr(attention.kv_b_proj, "tp_group", None))
    rows = keys_HNR.shape[0] * (keys_HNR.shape[1] + values_HRV.shape[2])
    yield HeldTensor(f"{name}.{LATENT}.weight", read, 0, place * rows)


def _experts(name: str, module: Any) -> Iterator[HeldTensor]:
    """Unpacked, gate above up as loaded; kernels with another order are left out."""
    is_plain = type(module.quant_method).__name__ == "UnquantizedFusedMoEMethod"
    w13_EIK, w2_EKI = module.w13_weight.detach(), module.w2_weight.detach()
    inner = module.intermediate_size_per_partition
    if not is_plain or module.use_triton_kernels or w13_EIK.dim() != 3 or w13_EIK.shape[1] != 2 * inner:
        return
    if getattr(module.quant_method, "use_flashinfer_trtllm_moe", False):
        return
    routed = module.num_local_experts - getattr(module, "num_fused_shared_experts", 0)
    cut = module.moe_tp_rank * inner
    for index in range(routed):
        expert = f"{name}.{module.moe_ep_rank * routed + index}"
        gate, up = w13_EIK[index].split(inner)
        for part, tensor, axis in (("gate_proj", gate, 0), ("up_proj", up, 0), ("down_proj", w2_EKI[index], 1)):
            yield HeldTensor(f"{expert}.{part}.weight", partial(_same, tensor), axis, cut)


def _same(tensor: Tensor) -> Tensor:
    return tensor


OWNER = "language_model"


def language_model(model: Any) -> Any:
    """The text part of SGLang's model: all of it if there is no tower."""
    return getattr(model, OWNER, None) or model


def name_in_files(name: str) -> str:
    """`language_model.model.layers.0.mlp` → `model.layers.0.mlp`."""
    return name.removeprefix(f"{OWNER}.")
