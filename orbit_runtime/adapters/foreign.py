"""An adapter from another training run as a slot of this run's layers: used only for multiplication."""

from __future__ import annotations

from collections.abc import Buffer, Mapping
from typing import Any

import torch
from torch import Tensor

from orbit_runtime.adapters.expert_layer import AdaptedExpertLinear
from orbit_runtime.adapters.files import MODEL_FILE, join_tensors, plain_key
from orbit_runtime.adapters.inject import AdaptedLayer
from orbit_runtime.adapters.layer import Slot
from orbit_runtime.adapters.lora import LoRASlot
from orbit_runtime.adapters.oft import OFTSlot, rotations
from orbit_runtime.adapters.state import parse_tensors
from orbit_runtime.adapters.tensorfile import are_finite, widened
from orbit_runtime.errors import ModelError


def load_foreign(
    layers: Mapping[str, AdaptedLayer], slot: str, config: Mapping[str, Any], files: Mapping[str, Buffer], place: str
) -> None:
    """Fills the slot of every layer; a layer that the adapter does not cover stays the base's.

    Args:
        config: PEFT's; only values that `checkpoints.adapter_folder` accepts.
        place: the folder, for messages.

    Raises:
        ModelError: (66) it adapts layers that this run's adapter does not, is of another kind while experts are
            adapted, has other shapes than this base, or is not finite; nothing was changed.
    """
    where = f"{place}/{MODEL_FILE}"
    tensors = {plain_key(name): tensor for name, tensor in parse_tensors(files, MODEL_FILE).items()}
    if not are_finite(tensors.values()):
        raise ModelError("a tensor is not finite", where=where, fix="take another checkpoint of that training")
    device, dtype = next(iter(layers.values())).device, next(iter(layers.values())).selection.compute_dtype
    build = _lora if config["peft_type"] == "LORA" else _oft
    slots: dict[str, Slot] = {}
    taken: set[str] = set()
    for name, layer in layers.items():
        kinds = ("lora_A", "lora_B") if build is _lora else ("oft_R",)
        names = {kind: layer.file_names(kind) for kind in kinds}
        wanted = {each for parts in names.values() for each in parts}
        if not wanted & tensors.keys():
            slots[name] = _nothing(layer, device, dtype)
            continue
        if isinstance(layer, AdaptedExpertLinear) and (build is _lora) != (layer.config.type == "LoRA"):
            raise ModelError(
                f"experts of {name} have an adapter of another type than this run's {layer.config.type}",
                where=where,
                fix="write the spec.adapter.type of that training",
            )
        if lacking := sorted(wanted - tensors.keys()):
            raise ModelError(f"the tensor {lacking[0]} is missing: its experts have another layout", where=where)
        taken |= wanted
        held = widened({each: tensors[each] for each in sorted(wanted)}, device, dtype)
        slots[name] = build(layer, {kind: join_tensors(parts, held) for kind, parts in names.items()}, config, where)
    if left := sorted(tensors.keys() - taken):
        module = left[0].rpartition(".")[0]
        raise ModelError(
            f"it adapts {module}, which this run's adapter does not: {len(left)} tensors cannot be used",
            where=where,
            fix=f"add {module.rpartition('.')[2]} to spec.adapter.targets, or take an adapter of this model",
        )
    for name, layer in layers.items():
        layer.slots[slot] = slots[name]


def _nothing(layer: AdaptedLayer, device: torch.device, dtype: torch.dtype) -> Slot:
    """A slot that leaves the layer as its base is, in the form that the layer multiplies by."""
    shapes = layer.shapes()
    if layer.config.type == "LoRA":
        A, B = (torch.zeros(shapes[kind], device=device, dtype=dtype) for kind in ("lora_A", "lora_B"))
        return LoRASlot(A, B, 1.0)
    size, shape = layer.config.block_size, shapes["oft_R"]
    return OFTSlot(torch.eye(size, device=device, dtype=dtype).expand(*shape[:-1], size, size))


def _lora(layer: AdaptedLayer, held: Mapping[str, Tensor], config: Mapping[str, Any], where: str) -> Slot:
    A, B = held["lora_A"], held["lora_B"]
    own = layer.shapes()
    wide = own["lora_A"][-1] if "lora_A" in own else layer.in_features
    tall = own["lora_B"][-2] if "lora_B" in own else layer.out_features
    if A.shape[-1] != wide or B.shape[-2] != tall or A.shape[-2] != B.shape[-1]:
        raise _other_base(layer, f"A {list(A.shape)} and B {list(B.shape)}", f"[{tall}, {wide}]", where)
    rank = A.shape[-2]
    root = rank**0.5 if config.get("use_rslora") else rank
    return LoRASlot(A, B, float(config["lora_alpha"]) / root)


def _oft(layer: AdaptedLayer, held: Mapping[str, Tensor], config: Mapping[str, Any], where: str) -> Slot:
    parameters, size = held["oft_R"], int(config["oft_block_size"])
    shape = (layer.in_features // size, size * (size - 1) // 2)
    if tuple(parameters.shape[-2:]) != shape or layer.in_features % size:
        raise _other_base(layer, f"oft_R {list(parameters.shape)}", f"{list(shape)} for blocks of {size}", where)
    kind = "CayleyNeumann" if config.get("use_cayley_neumann") else "Cayley"
    flat = parameters.float().flatten(0, -2)
    R = rotations(flat, size, kind, int(config.get("num_cayley_neumann_terms") or 5))
    rounded = R.to(torch.bfloat16).to(parameters.dtype)
    return OFTSlot(rounded.unflatten(0, parameters.shape[:-1]))


def _other_base(layer: AdaptedLayer, found: str, wanted: str, where: str) -> ModelError:
    return ModelError(
        f"{layer.name}: the adapter has {found}, this base needs {wanted}",
        where=where,
        fix="it was trained on another base: take an adapter of this model",
    )
