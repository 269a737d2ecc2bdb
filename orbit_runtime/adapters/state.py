"""An adapter as files in PEFT's format, as digests, and as masters in a checkpoint.

    adapter_model.safetensors   `base_model.model.<module>.lora_A.weight`, `.lora_B.weight` in BF16, or `.oft_R.weight` in fp32
    adapter_config.json         PEFT's configuration, with which PEFT loads the folder unchanged
    rotations.safetensors       OFT only: `<module>.oft_R` BF16 `[K/b, b, b]`, the R that trainer and engine multiply by

Files are canonical: equal tensors give equal bytes. Layers that share one OFT parameter are written as equal per-module ones.

Belongs here: names, bytes, digests and strict loading. Does not belong here: storing (`storage`), proving (`loop`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from orbit_runtime.adapters import tensorfile
from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.inject import Injected, owners
from orbit_runtime.adapters.layer import TRAINER_SLOT, AdaptedLinear, Applied, Slot
from orbit_runtime.adapters.lora import LoRASlot
from orbit_runtime.adapters.oft import OFTSlot, rotations
from orbit_runtime.errors import InternalError, ModelError

MODEL_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
ROTATIONS_FILE = "rotations.safetensors"
PEFT_PREFIX = "base_model.model."

ROTATION_TOLERANCE = 2.0**-6
"""How far a published R may lie from the one rebuilt from its parameters: BF16 rounding and other machines' fp32."""


def config_json(config: AdapterConfig, base_model_name: str) -> bytes:
    """`adapter_config.json`, keys sorted."""
    fields: dict[str, Any] = {
        "base_model_name_or_path": base_model_name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "peft_version": "0.21.2",
        "target_modules": sorted(config.targets),
        "task_type": "CAUSAL_LM",
    }
    if config.type == "LoRA":
        alpha = int(config.alpha) if config.alpha == int(config.alpha) else config.alpha
        fields |= {"peft_type": "LORA", "r": config.rank, "lora_alpha": alpha, "lora_dropout": 0.0}
        fields |= {"init_lora_weights": True, "use_rslora": False, "use_dora": False, "rank_pattern": {}, "alpha_pattern": {}}
    else:
        fields |= {"peft_type": "OFT", "r": 0, "oft_block_size": config.block_size, "module_dropout": 0.0}
        fields |= {"coft": False, "eps": 6e-5, "block_share": False, "init_weights": True}
        fields |= {"use_cayley_neumann": config.parametrization == "CayleyNeumann"}
        fields |= {"num_cayley_neumann_terms": config.neumann_terms}
    return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()


def export_adapter(injected: Injected, config: AdapterConfig, base_model_name: str) -> dict[str, bytes]:
    """The files that publish the masters as they are now."""
    values = injected.masters.parameters
    with torch.no_grad():
        if config.type == "LoRA":
            tensors = {_peft_key(key): parameter.to(torch.bfloat16) for key, parameter in values.items()}
            return {MODEL_FILE: tensorfile.dump(tensors), CONFIG_FILE: config_json(config, base_model_name)}
        assert config.rotation_dtype == "BF16", "an adapter with fp32 rotations is for comparisons only"
        owner = injected.masters.owner
        built = {name: R.to(torch.bfloat16) for name, R in injected.masters.rotations().items()}
        return {
            MODEL_FILE: tensorfile.dump({_peft_key(f"{name}.oft_R"): values[f"{owner[name]}.oft_R"] for name in owner}),
            ROTATIONS_FILE: tensorfile.dump({f"{name}.oft_R": built[owner[name]] for name in owner}),
            CONFIG_FILE: config_json(config, base_model_name),
        }


def files_digest(files: Mapping[str, bytes]) -> str:
    """`sha256:<hex>` over every file's name, length and bytes, names sorted."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{len(name.encode())}:{name}:{len(files[name])}:".encode())
        digest.update(files[name])
    return f"sha256:{digest.hexdigest()}"


def load_slot(layers: Mapping[str, AdaptedLinear], slot_name: str, files: Mapping[str, bytes]) -> None:
    """Fill the slot of every layer from published bytes, or raise `ModelError` naming the tensor and change nothing."""
    first = next(iter(layers.values()))
    if slot_name == TRAINER_SLOT or slot_name in first.slots:
        raise InternalError(f"the adapter slot {slot_name!r} is already taken")
    config = first.config
    _check_files(files, config)
    tensors = _parse(files, MODEL_FILE)
    kinds = ("lora_A", "lora_B") if config.type == "LoRA" else ("oft_R",)
    _check_tensors(MODEL_FILE, tensors, {_peft_key(f"{name}.{kind}"): _shape(layer, kind) for name, layer in layers.items()
                                         for kind in kinds}, torch.bfloat16 if config.type == "LoRA" else torch.float32)
    if config.type == "LoRA":
        slots = _lora_slots(layers, tensors)
    else:
        slots = _oft_slots(layers, tensors, _parse(files, ROTATIONS_FILE))
    for name, layer in layers.items():
        layer.slots[slot_name] = slots[name]


def remove_slot(layers: Mapping[str, AdaptedLinear], slot_name: str) -> None:
    """Safe to call twice."""
    for layer in layers.values():
        layer.slots.pop(slot_name, None)


def slot_files(layers: Mapping[str, AdaptedLinear], slot_name: str, config_bytes: bytes) -> dict[str, bytes]:
    """What stands in the slot now, serialised again: equal to the published files unless something changed it.

    `config_bytes` is the published `adapter_config.json`, from which nothing is kept in a slot but the scaling.
    """
    model, turned = {}, {}
    for name, layer in layers.items():
        slot = layer.slots.get(slot_name)
        if slot is None:
            continue
        if isinstance(slot, LoRASlot):
            # A scaling that is not the published one must show, and it has no tensor of its own.
            suffix = "" if slot.scaling == layer.config.scaling else f".scaling={slot.scaling!r}"
            for kind, tensor in slot.tensors().items():
                model[_peft_key(f"{name}.{kind}") + suffix] = _narrowed(tensor)
        else:
            assert slot.parameters is not None
            model[_peft_key(f"{name}.oft_R")] = slot.parameters
            turned[f"{name}.oft_R"] = _narrowed(slot.rotation)
    files = {MODEL_FILE: tensorfile.dump(model), CONFIG_FILE: config_bytes}
    return files | ({ROTATIONS_FILE: tensorfile.dump(turned)} if turned else {})


def applied_digest(trace: Iterable[Applied]) -> str:
    """Digest of module → the tensors that it multiplied by, from the trace of a pass."""
    return _digest_applied((entry.module, entry.tensors, entry.scaling) for entry in trace)


def expected_applied_digest(files: Mapping[str, bytes]) -> str:
    """What `applied_digest` must be when a pass applied exactly these files in every layer."""
    fields = json.loads(files[CONFIG_FILE])
    scaling = None
    if fields["peft_type"] == "LORA":
        tensors, scaling = _parse(files, MODEL_FILE), float(fields["lora_alpha"]) / fields["r"]
    else:
        tensors = _parse(files, ROTATIONS_FILE)
    by_module: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        module, _, kind = key.removeprefix(PEFT_PREFIX).removesuffix(".weight").rpartition(".")
        by_module.setdefault(module, {})[kind] = tensor
    return _digest_applied((module, kinds, scaling) for module, kinds in by_module.items())


def masters(injected: Injected) -> dict[str, Tensor]:
    """fp32 copies for a checkpoint, shared ones once: `<module>.lora_A`, `<module>.lora_B`, `<module>.oft_R`."""
    return {name: parameter.detach().clone() for name, parameter in injected.masters.parameters.items()}


def load_masters(injected: Injected, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `masters`, in place, bit for bit; raises `ModelError` naming the tensor and changes nothing."""
    parameters = injected.masters.parameters
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    _check_tensors("adapter masters", tensors, shapes, torch.float32)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def _peft_key(key: str) -> str:
    return f"{PEFT_PREFIX}{key}.weight"


def _shape(layer: AdaptedLinear, kind: str) -> tuple[int, ...]:
    size = layer.config.block_size
    return {
        "lora_A": (layer.config.rank, layer.in_features),
        "lora_B": (layer.out_features, layer.config.rank),
        "oft_R": (layer.in_features // size, size * (size - 1) // 2),
        "rotation": (layer.in_features // size, size, size),
    }[kind]


def _parse(files: Mapping[str, bytes], name: str) -> dict[str, Tensor]:
    try:
        return tensorfile.parse(files[name], where=name)
    except KeyError as error:
        raise ModelError(f"tensors of dtype {error} do not belong in an adapter", where=name) from None


def _check_files(files: Mapping[str, bytes], config: AdapterConfig) -> None:
    wanted = {MODEL_FILE, CONFIG_FILE} | ({ROTATIONS_FILE} if config.type == "OFT" else set())
    for name in sorted(wanted ^ set(files)):
        raise ModelError("the file is missing" if name in wanted else "the file does not belong here", where=name)
    try:
        found = json.loads(files[CONFIG_FILE])
    except ValueError:
        raise ModelError("the file does not parse", where=CONFIG_FILE) from None
    expected = json.loads(config_json(config, ""))
    compared = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "oft_block_size", "use_cayley_neumann", "coft")
    compared += ("num_cayley_neumann_terms", "block_share")
    for key in compared:
        if found.get(key) != expected.get(key):
            raise ModelError(f"{key} is {found.get(key)!r}, this run's is {expected.get(key)!r}", where=CONFIG_FILE)


def _check_tensors(
    where: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> None:
    for key in sorted(shapes.keys() - tensors.keys()):
        raise ModelError(f"the tensor {key} is missing", where=where)
    for key in sorted(tensors.keys() - shapes.keys()):
        raise ModelError(f"the tensor {key} belongs to no layer of this model", where=where)
    for key, shape in shapes.items():
        tensor = tensors[key]
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise ModelError(f"the tensor {key} is {found}, expected {dtype} {list(shape)}", where=where)
        if not bool(tensor.isfinite().all()):
            raise ModelError(f"the tensor {key} is not finite", where=where)


def _lora_slots(layers: Mapping[str, AdaptedLinear], tensors: Mapping[str, Tensor]) -> dict[str, Slot]:
    return {
        name: LoRASlot(
            _widened(tensors[_peft_key(f"{name}.lora_A")], layer),
            _widened(tensors[_peft_key(f"{name}.lora_B")], layer),
            layer.config.scaling,
        )
        for name, layer in layers.items()
    }


def _oft_slots(
    layers: Mapping[str, AdaptedLinear], tensors: Mapping[str, Tensor], turned: Mapping[str, Tensor]
) -> dict[str, Slot]:
    shapes = {f"{name}.oft_R": _shape(layer, "rotation") for name, layer in layers.items()}
    _check_tensors(ROTATIONS_FILE, turned, shapes, torch.bfloat16)
    config = next(iter(layers.values())).config
    owner = owners(layers)
    for name in layers:
        for file, values, key in ((MODEL_FILE, tensors, _peft_key), (ROTATIONS_FILE, turned, str)):
            mine, shared = values[key(f"{name}.oft_R")], values[key(f"{owner[name]}.oft_R")]
            if not torch.equal(mine, shared):
                message = f"the tensor {key(f'{name}.oft_R')} differs from that of {owner[name]}, which takes the same input"
                raise ModelError(message, where=file)
    distinct = sorted(set(owner.values()))
    stacked = torch.cat([tensors[_peft_key(f"{name}.oft_R")] for name in distinct])
    rebuilt = rotations(stacked, config.block_size, config.parametrization, config.neumann_terms)
    parts = rebuilt.split([tensors[_peft_key(f"{name}.oft_R")].shape[0] for name in distinct])
    for name, R in zip(distinct, parts, strict=True):
        if (turned[f"{name}.oft_R"].float() - R).abs().max() > ROTATION_TOLERANCE * max(1.0, float(R.abs().max())):
            raise ModelError(f"the tensor {name}.oft_R is not the rotation of its parameters", where=ROTATIONS_FILE)
    shared_R = {name: _widened(turned[f"{name}.oft_R"], layers[name]) for name in distinct}
    return {name: OFTSlot(shared_R[owner[name]], tensors[_peft_key(f"{name}.oft_R")].clone()) for name in layers}


def _widened(tensor: Tensor, layer: AdaptedLinear) -> Tensor:
    """Its own memory, in the compute dtype, on the layer's device."""
    return tensor.to(device=layer.device, dtype=layer.selection.compute_dtype, copy=True)


def _narrowed(tensor: Tensor) -> Tensor:
    """As published: BF16 where that is exact, and as it is, which changes the digest, where it is not."""
    tensor = tensor.detach()
    narrow = tensor.to(torch.bfloat16)
    same = narrow.to(tensor.dtype).view(torch.uint8).eq(tensor.contiguous().view(torch.uint8)).all()
    return narrow if bool(same) else tensor.float()


def _digest_applied(entries: Iterable[tuple[str, Mapping[str, Tensor], float | None]]) -> str:
    """A module that applied two different things in one pass counts twice, so it cannot equal what was published."""
    seen = set()
    for module, tensors, scaling in entries:
        digest = hashlib.sha256(f"{module}\n{scaling if scaling is None else float(scaling).hex()}\n".encode())
        for kind in sorted(tensors):
            narrow = _narrowed(tensors[kind])
            digest.update(f"{kind} {narrow.dtype} {list(narrow.shape)}\n".encode())
            digest.update(tensorfile.tensor_bytes(narrow))
        seen.add((module, digest.hexdigest()))
    whole = hashlib.sha256()
    for module, hexdigest in sorted(seen):
        whole.update(f"{module} {hexdigest}\n".encode())
    return f"sha256:{whole.hexdigest()}"
