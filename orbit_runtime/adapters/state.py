"""An adapter as files in PEFT's format, and as digests.

    adapter_model.safetensors   `base_model.model.<module>.lora_A.weight`, `.lora_B.weight` BF16; `.oft_R.weight` fp32;
                                experts as `adapters.files` says
    adapter_config.json         PEFT's configuration, with which PEFT loads the folder unchanged
    rotations.safetensors       OFT only: `<module>.oft_R` BF16 `[K/b, b, b]`, the R that trainer and engine multiply by

Files are canonical: equal tensors give equal bytes. Layers that share an OFT parameter are written as equal ones.

Belongs here: bytes, digests and strict loading; hashes of what the layers of a pass multiply by, taken while the pass
goes on; how an adapter differs from the published one. Does not belong here: names (`files`), storing (`storage`),
proving (`loop`).
"""

from __future__ import annotations

import json
from collections.abc import Buffer, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from orbit_runtime.adapters import tensorfile
from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.files import (
    CONFIG_FILE,
    MODEL_FILE,
    PEFT_PREFIX,
    ROTATIONS_FILE,
    digest_applied,
    join_tensors,
    plain_key,
    split_tensor,
)
from orbit_runtime.adapters.inject import AdaptedLayer, InjectedAdapter, owners
from orbit_runtime.adapters.layer import TRAINER_SLOT, AppliedTensors, Slot
from orbit_runtime.adapters.lora import LoRASlot
from orbit_runtime.adapters.oft import OFTSlot, rotations
from orbit_runtime.adapters.tensorfile import TensorFile
from orbit_runtime.digests import Pieces, cut, hash_pieces, tree_digest
from orbit_runtime.errors import InternalError, ModelError
from orbit_runtime.types import AdapterManifest, AdapterSink

DESCRIPTIVE_FIELDS = {"base_model_name_or_path", "inference_mode", "peft_version", "target_modules", "task_type"}
"""Configuration fields that describe the file, or are checked through the tensors' names; they may differ."""

ROTATION_TOLERANCE = 2.0**-6
"""Largest difference of a published R from the one rebuilt from its parameters: BF16 rounding and
other machines' fp32.
"""


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
        fields |= {"peft_type": "LORA", "r": config.rank, "lora_alpha": alpha, "lora_dropout": config.dropout}
        fields |= {"init_lora_weights": True, "use_rslora": config.rslora, "use_dora": False}
        fields |= {"rank_pattern": {}, "alpha_pattern": {}}
    else:
        fields |= {"peft_type": "OFT", "r": 0, "oft_block_size": config.block_size, "module_dropout": 0.0}
        fields |= {"coft": config.coft, "eps": config.coft_eps, "block_share": False, "init_weights": True}
        fields |= {"use_cayley_neumann": config.parametrization == "CayleyNeumann"}
        fields |= {"num_cayley_neumann_terms": config.neumann_terms}
    return config_file(fields)


def config_file(fields: Mapping[str, Any]) -> bytes:
    """The canonical serialisation of these fields, so that their bytes can be rebuilt."""
    return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()


def build_files(
    injected: InjectedAdapter, config: AdapterConfig, base_model_name: str
) -> dict[str, TensorFile | bytes]:
    """The files that publish the current masters; LoRA's values are computed when they are read."""
    values = injected.masters.parameters
    settings = config_json(config, base_model_name)
    if config.type == "LoRA":
        tensors = {_peft_key(key): part for key, part in _parts(injected.layers, values).items()}
        return {CONFIG_FILE: settings, MODEL_FILE: tensorfile.build(tensors, torch.bfloat16)}
    assert config.rotation_dtype == "BF16", "an adapter with fp32 rotations is for comparisons only"
    owner = injected.masters.owner
    with torch.no_grad():
        built = injected.masters.rotations.every()
    parameters = _parts(injected.layers, {f"{name}.oft_R": values[f"{owner[name]}.oft_R"] for name in owner})
    tensors = {_peft_key(key): part for key, part in parameters.items()}
    turned = _parts(injected.layers, {f"{name}.oft_R": built[owner[name]] for name in owner})
    return {
        CONFIG_FILE: settings,
        MODEL_FILE: tensorfile.build(tensors, torch.float32),
        ROTATIONS_FILE: tensorfile.build(turned, torch.bfloat16),
    }


def write_adapter(
    injected: InjectedAdapter, config: AdapterConfig, base_model_name: str, sink: AdapterSink
) -> AdapterManifest:
    """Streams the files into the sink and hashes each piece on the way: the only pass over an adapter's bytes."""
    found = {}
    for name, file in build_files(injected, config, base_model_name).items():
        if isinstance(file, bytes):
            found[name] = sink.write(name, len(file), cut(file))
        else:
            found[name] = sink.write(name, file.size, file.pieces())
    return AdapterManifest(found)


def export_adapter(injected: InjectedAdapter, config: AdapterConfig, base_model_name: str) -> dict[str, bytes]:
    """The files as whole byte strings; for small adapters."""
    files = build_files(injected, config, base_model_name)
    return {name: file if isinstance(file, bytes) else b"".join(file.pieces()) for name, file in files.items()}


def load_slot(layers: Mapping[str, AdaptedLayer], slot_name: str, files: Mapping[str, Buffer]) -> None:
    """Fills the slot of every layer from published bytes, or raises `ModelError` for a tensor and changes nothing."""
    first = next(iter(layers.values()))
    if slot_name == TRAINER_SLOT or slot_name in first.slots:
        raise InternalError(f"the adapter slot {slot_name!r} is already taken")
    config = first.config
    _check_files(files, config)
    tensors = parse_tensors(files, MODEL_FILE)
    if config.type == "LoRA":
        slots = _lora_slots(layers, tensors)
    else:
        slots = _oft_slots(layers, tensors, parse_tensors(files, ROTATIONS_FILE))
    for name, layer in layers.items():
        layer.slots[slot_name] = slots[name]


def remove_slot(layers: Mapping[str, AdaptedLayer], slot_name: str) -> None:
    """Safe to call twice."""
    for layer in layers.values():
        layer.slots.pop(slot_name, None)


def slot_digest(layers: Mapping[str, AdaptedLayer], slot_name: str, config_bytes: bytes) -> str:
    """Digest of the slot's current contents: the published digest unless something changed them.

    `config_bytes` is the published `adapter_config.json`, of which a slot keeps only the scaling.
    """
    main, turned = _slot_tensors(layers, slot_name)
    if next(iter(layers.values())).config.type == "LoRA":
        return held_digest(config_bytes, shapes_of(main), tensorfile.tensor_pieces(main.items()))
    return held_digest(config_bytes, shapes_of(turned), tensorfile.tensor_pieces(turned.items()), parameters=main)


def held_digest(
    config_bytes: bytes,
    shapes: Mapping[str, Sequence[int]],
    pieces: Mapping[str, Pieces],
    *,
    parameters: Mapping[str, Tensor] | None = None,
) -> str:
    """Digest of an adapter, computed from the tensors that an engine holds.

    Args:
        shapes, pieces: those of the BF16 tensors that layers multiply by, keyed by their names in their file.
        parameters: OFT's parameters; None for LoRA.
    """
    found = {CONFIG_FILE: hash_pieces(cut(config_bytes))}
    held = tensorfile.assemble(shapes, pieces)
    if parameters is None:
        return tree_digest(found | {MODEL_FILE: held})
    stored = hash_pieces(tensorfile.build(parameters, torch.float32).pieces())
    return tree_digest(found | {MODEL_FILE: stored, ROTATIONS_FILE: held})


def slot_files(layers: Mapping[str, AdaptedLayer], slot_name: str, config_bytes: bytes) -> dict[str, bytes]:
    """The slot's current contents, serialised again to show how they differ from what was published."""
    main, turned = _slot_tensors(layers, slot_name)
    if next(iter(layers.values())).config.type == "LoRA":
        return {MODEL_FILE: tensorfile.dump_narrowed(main), CONFIG_FILE: config_bytes}
    return {
        MODEL_FILE: tensorfile.dump(main, torch.float32),
        ROTATIONS_FILE: tensorfile.dump_narrowed(turned),
        CONFIG_FILE: config_bytes,
    }


def _slot_tensors(layers: Mapping[str, AdaptedLayer], slot_name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of `MODEL_FILE` and, for OFT, of `ROTATIONS_FILE`, by their names there."""
    main: dict[str, Tensor] = {}
    turned: dict[str, Tensor] = {}
    for layer in layers.values():
        slot = layer.slots.get(slot_name)
        if isinstance(slot, LoRASlot):
            # A scaling other than the published one must show, although no tensor contains it.
            suffix = "" if slot.scaling == layer.config.scaling else f".scaling={slot.scaling!r}"
            main |= {_peft_key(key) + suffix: tensor for key, tensor in layer.named(slot).items()}
        elif slot is not None and slot.parameters is not None:
            parts = split_tensor(layer.file_names("oft_R"), slot.parameters)
            main |= {_peft_key(key): part for key, part in parts.items()}
            turned |= layer.named(slot)
    return main, turned


def applied_digest(trace: Iterable[AppliedTensors]) -> str:
    """Digest of module → the tensors that it multiplied by, from the trace of a pass.

    A module that applied two different things in one pass counts twice, so the digest cannot equal the published one.
    """
    tensors: dict[str, Tensor] = {}
    scalings = set()
    for entry in trace:
        scalings.add(entry.scaling)
        for name, tensor in entry.tensors.items():
            key = name
            while key in tensors and tensors[key] is not tensor:
                key += " and"
            tensors[key] = tensor
    return digest_applied(shapes_of(tensors), tensorfile.tensor_pieces(tensors.items()), scalings)


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def published_tensors(files: Mapping[str, Buffer]) -> dict[str, Tensor]:
    """The tensors that layers multiply by under this adapter: `<module>.lora_A` and `.lora_B`, or OFT's rotations."""
    if json.loads(bytes(files[CONFIG_FILE]))["peft_type"] == "OFT":
        return parse_tensors(files, ROTATIONS_FILE)
    return {plain_key(key): tensor for key, tensor in parse_tensors(files, MODEL_FILE).items()}


def _peft_key(key: str) -> str:
    return f"{PEFT_PREFIX}{key}.weight"


def _parts(layers: Mapping[str, AdaptedLayer], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`<module>.<kind>` → value, by file name."""
    parts: dict[str, Tensor] = {}
    for key, value in values.items():
        name, _, kind = key.rpartition(".")
        parts |= split_tensor(layers[name].file_names(kind), value)
    return parts


def _shapes(layer: AdaptedLayer, kind: str) -> dict[str, tuple[int, ...]]:
    """Name in the file → shape. `rotation` refers to the tensors called `oft_R` in the file of rotations."""
    stored = "oft_R" if kind == "rotation" else kind
    names, shape = layer.file_names(stored), layer.shapes()[stored]
    if kind == "rotation":
        shape = (*shape[:-1], layer.config.block_size, layer.config.block_size)
    return dict.fromkeys(names, shape[1:] if len(names) > 1 else shape)


def parse_tensors(files: Mapping[str, Buffer], name: str) -> dict[str, Tensor]:
    """The tensors of one of an adapter's files. Raises ModelError if it cannot be parsed."""
    try:
        return tensorfile.parse(files[name], where=name)
    except KeyError as error:
        raise ModelError(f"tensors of dtype {error} do not belong in an adapter", where=name) from None


def _check_files(files: Mapping[str, Buffer], config: AdapterConfig) -> None:
    wanted = {MODEL_FILE, CONFIG_FILE} | ({ROTATIONS_FILE} if config.type == "OFT" else set())
    for name in sorted(wanted ^ set(files)):
        raise ModelError("the file is missing" if name in wanted else "the file does not belong here", where=name)
    try:
        found = json.loads(bytes(files[CONFIG_FILE]))
    except ValueError:
        raise ModelError("the file does not parse", where=CONFIG_FILE) from None
    expected = json.loads(config_json(config, ""))
    for key in sorted(expected.keys() - DESCRIPTIVE_FIELDS):
        if found.get(key) != expected[key]:
            raise ModelError(f"{key} is {found.get(key)!r}, this run's is {expected[key]!r}", where=CONFIG_FILE)


def check_tensors(
    where: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> None:
    """Raises ModelError for the first tensor that is missing, unexpected, not finite, or of another shape or dtype."""
    for key in sorted(shapes.keys() - tensors.keys()):
        raise ModelError(f"the tensor {key} is missing", where=where)
    for key in sorted(tensors.keys() - shapes.keys()):
        raise ModelError(f"the tensor {key} belongs to no layer of this model", where=where)
    for key, shape in shapes.items():
        tensor = tensors[key]
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise ModelError(f"the tensor {key} is {found}, expected {dtype} {list(shape)}", where=where)
    if not tensorfile.are_finite(tensors.values()):
        key = next(key for key in sorted(tensors) if not bool(tensors[key].isfinite().all()))
        raise ModelError(f"the tensor {key} is not finite", where=where)


def _lora_slots(layers: Mapping[str, AdaptedLayer], tensors: Mapping[str, Tensor]) -> dict[str, Slot]:
    kinds = ("lora_A", "lora_B")
    shapes = {
        _peft_key(name): shape
        for layer in layers.values()
        for kind in kinds
        for name, shape in _shapes(layer, kind).items()
    }
    check_tensors(MODEL_FILE, tensors, shapes, torch.bfloat16)
    wide = {plain_key(key): tensor for key, tensor in _widened(tensors, layers).items()}
    slots: dict[str, Slot] = {}
    for name, layer in layers.items():
        A, B = (join_tensors(layer.file_names(kind), wide) for kind in kinds)
        slots[name] = LoRASlot(A, B, layer.config.scaling)
    return slots


def _oft_slots(
    layers: Mapping[str, AdaptedLayer], tensors: Mapping[str, Tensor], turned: Mapping[str, Tensor]
) -> dict[str, Slot]:
    shapes = {_peft_key(key): shape for each in layers.values() for key, shape in _shapes(each, "oft_R").items()}
    check_tensors(MODEL_FILE, tensors, shapes, torch.float32)
    shapes = {key: shape for each in layers.values() for key, shape in _shapes(each, "rotation").items()}
    check_tensors(ROTATIONS_FILE, turned, shapes, torch.bfloat16)
    owner, names = owners(layers), {name: layer.file_names("oft_R") for name, layer in layers.items()}
    for name in layers:
        for key, owner_key in zip(names[name], names[owner[name]], strict=True):
            check_shared(MODEL_FILE, tensors, _peft_key(key), _peft_key(owner_key))
            check_shared(ROTATIONS_FILE, turned, key, owner_key)
    owned = [key for name in sorted(set(owner.values())) for key in names[name]]
    _check_rotations({key: tensors[_peft_key(key)] for key in owned}, turned, next(iter(layers.values())).config)
    wide = _widened({key: turned[key] for key in owned}, layers)
    R = {name: join_tensors(names[name], wide) for name in set(owner.values())}
    plain = {plain_key(key): tensor for key, tensor in tensors.items()}
    return {name: OFTSlot(R[owner[name]], join_tensors(names[name], plain).clone()) for name in layers}


def check_shared(where: str, tensors: Mapping[str, Tensor], key: str, owner_key: str) -> None:
    """Raises ModelError if two layers with the same input have different tensors."""
    if key != owner_key and not torch.equal(tensors[key], tensors[owner_key]):
        raise ModelError(f"the tensor {key} differs from {owner_key}, which takes the same input", where=where)


def _check_rotations(parameters: Mapping[str, Tensor], turned: Mapping[str, Tensor], config: AdapterConfig) -> None:
    """Checks that the published R matches the published parameters. Both use the keys of the file of rotations."""
    stacked = torch.cat([tensor.flatten(0, -2) for tensor in parameters.values()])
    rebuilt = rotations(stacked, config.block_size, config.parametrization, config.neumann_terms)
    published = torch.cat([turned[key].flatten(0, -3) for key in parameters]).float()
    wrong_blocks = ((published - rebuilt).abs() > ROTATION_TOLERANCE * rebuilt.abs().clamp(min=1.0)).flatten(1).any(1)
    if not bool(wrong_blocks.any()):
        return
    counts = [tensor.flatten(0, -2).shape[0] for tensor in parameters.values()]
    for key, wrong in zip(parameters, torch.split(wrong_blocks, counts), strict=True):
        if bool(wrong.any()):
            raise ModelError(f"the tensor {key} is not the rotation of its parameters", where=ROTATIONS_FILE)


def _widened(tensors: Mapping[str, Tensor], layers: Mapping[str, AdaptedLayer]) -> dict[str, Tensor]:
    """Copies in the compute dtype, on the layers' device."""
    layer = next(iter(layers.values()))
    return tensorfile.widened(tensors, layer.device, layer.selection.compute_dtype)


AppliedPieces = Mapping[str, tuple[Pieces, ...]]
"""`<module>.<kind>` → pieces of each tensor that this process holds of it: one for each expert if each has its own in
files."""

_Key = tuple[str, int, int]
"""Parameter, index of its tensor, and how often that was applied before."""


_IN_FLIGHT_BYTES = 1 << 23
"""Enough to keep eight threads busy; nothing of a pass may pile up while they have no processor."""


class AppliedHashes:
    """Hashes of what layers apply in one pass without gradient; `add` is a trace."""

    def __init__(self, layers: Mapping[str, AdaptedLayer]) -> None:
        self._layers = layers
        self._hasher = tensorfile.TensorHasher[_Key](_IN_FLIGHT_BYTES)
        self._times: dict[tuple[str, int], int] = {}
        self.scalings: dict[str, set[float | None]] = {}
        """Module → the scalings it applied."""

    def add(self, entry: AppliedTensors) -> None:
        self.scalings.setdefault(entry.module, set()).add(entry.scaling)
        self._hasher.add(self._keyed(entry))

    def _keyed(self, entry: AppliedTensors) -> Iterator[tuple[_Key, Tensor]]:
        layer = self._layers[entry.module]
        for kind in layer.shapes():
            names, indices = layer.held_names(kind), range(len(layer.held_names(kind)))
            indices = indices[entry.experts] if len(names) > 1 else indices
            for index in indices:
                place = (f"{entry.module}.{kind}", index)
                times = self._times[place] = self._times.get(place, -1) + 1
                yield (*place, times), entry.tensors[names[index]].detach()

    def result(self) -> AppliedPieces:
        """Pieces of the parameters whose tensors were all applied.

        Raises:
            InternalError: one pass applied two different values of a parameter.
        """
        found = self._hasher.result()
        for (key, index, times), pieces in found.items():
            if times and pieces != found[key, index, 0]:
                raise InternalError(f"one pass applied two different values of {key}")
        result: dict[str, tuple[Pieces, ...]] = {}
        for module in self.scalings:
            layer = self._layers[module]
            for kind in layer.shapes():
                places = [(f"{module}.{kind}", index, 0) for index in range(len(layer.held_names(kind)))]
                if all(place in found for place in places):
                    result[f"{module}.{kind}"] = tuple(found[place] for place in places)
        return result


NAMED = 2
"""Number of differences that are described individually."""


def explain_difference(published: Mapping[str, Buffer], found: Mapping[str, Buffer]) -> str:
    """Empty if the files are equal.

    Example: `model.layers.1.mlp.down_proj.oft_R is the identity (1 of 14 tensors differs)`
    """
    differences: list[str] = []
    total = 0
    for name in sorted(published.keys() | found.keys()):
        if name not in found or name not in published:
            differences.append(f"{name} is {'missing' if name not in found else 'there and was not published'}")
        elif published[name] == found[name]:
            total += 0 if name == CONFIG_FILE else len(parse_tensors(published, name))
        elif name == CONFIG_FILE:
            differences += _explain_settings(bytes(published[name]), bytes(found[name]))
        else:
            try:
                before, now = parse_tensors(published, name), parse_tensors(found, name)
            except ModelError as error:
                differences.append(f"{name}: {error.message}")
                continue
            total += len(before)
            differences += explain_tensors(before, now)
    return join_differences(differences, total)


def join_differences(differences: Sequence[str], total: int) -> str:
    """The first differences, and their number out of all tensors; empty if there are none."""
    if not differences:
        return ""
    told = "; ".join(differences[:NAMED])
    if len(differences) > NAMED:
        told += "; …"
    return f"{told} ({len(differences)} of {total} tensors {'differs' if len(differences) == 1 else 'differ'})"


def _explain_settings(before: bytes, now: bytes) -> list[str]:
    try:
        old, new = json.loads(before), json.loads(now)
    except ValueError:
        return [f"{CONFIG_FILE} does not parse"]
    return [
        f"{key} is {new.get(key)!r}, published was {old.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def explain_tensors(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> list[str]:
    """One sentence per tensor that differs from the published one."""
    told = [f"{key} is missing" for key in sorted(before.keys() - now.keys())]
    told += [f"{key} is there and was not published" for key in sorted(now.keys() - before.keys())]
    for key in sorted(before.keys() & now.keys()):
        if before[key].shape != now[key].shape:
            told.append(f"{key} is {list(now[key].shape)}, published was {list(before[key].shape)}")
        elif not torch.equal(before[key].float(), now[key].float()):
            told.append(f"{key} {_how(key, before, now[key].float())}")
    return told


def _how(key: str, published: Mapping[str, Tensor], found: Tensor) -> str:
    """The kind of difference between the tensors, if it has a name."""
    before = published[key].float()
    if not bool(found.any()):
        return "is zero"
    if found.dim() >= 2 and found.shape[-1] == found.shape[-2]:
        if torch.equal(found, torch.eye(found.shape[-1]).expand_as(found)):
            return "is the identity"
        if torch.equal(found, before.transpose(-1, -2)):
            return "is transposed"
    largest = before.abs().argmax()
    ratio = float(found.flatten()[largest] / before.flatten()[largest]) if bool(before.any()) else 0.0
    if abs(ratio - 1) > 2**-7 and ratio and torch.allclose(found, before * ratio, rtol=2**-7, atol=0.0):
        return f"is {ratio:.3g} times what was published"
    for other, tensor in published.items():
        if other != key and tensor.shape == found.shape and torch.equal(tensor.float(), found):
            return f"holds {other}"
    wrong = int((found != before).sum())
    return f"has other values ({wrong} of {found.numel()})"
