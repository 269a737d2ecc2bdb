"""Models of types without a row in `families`: what each tensor of a checkpoint is, by a record of its type.

`policy.module_tree` makes a record from transformers' modules. Those of the types that tests compare with transformers
are shipped in `types.json`; any other is made in a child process, where torch is installed, and kept in the cache. A
record holds names and roles only: sizes are those of the headers, so that it costs the same for every size of model.

Belongs here: finding a record, and an `Architecture` from it, config.json and the headers. Does not belong here: torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from orbit_runtime.errors import ModelError, UnsupportedError
from orbit_runtime.model_info.headers import TensorInfo
from orbit_runtime.model_info.layouts import read_linears
from orbit_runtime.model_info.quantization import parse_quantization
from orbit_runtime.model_info.weights import EXPERT, SHARED_INPUTS, Architecture, KVCacheSize, StoredWeight, Weight

VERSION = 2
"""Changes with what a record holds, so that no older one is used."""
REFUSED = " cannot be used here: "
SECONDS = 600.0
"""For building a model's modules without storage, and the passes of its small copy."""
ANOTHER = "choose a model of another family (docs/guides/models.md)"
MISMATCH = "config.json and the weights belong to different models, or files are missing: copy the model again"
STATES = ("state_size", "mamba_d_state", "ssm_state_size", "linear_key_head_dim")
"""Fields with the elements of a recurrent state for each of a layer's channels."""
STATE_BYTES, INDEX_SCALE_BYTES = 4, 4
"""Bytes of an element of a recurrent state, and of the scale that SGLang keeps with the FP8 key of an indexer."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_EXPERT_NUMBER = re.compile(r"\.experts\.\d+\.")

Record = Mapping[str, Any]
"""`roles`: name in the checkpoint, `*` for a number → role and, for a linear, its targets · `targets`: the default ones
· `sizes`: size → its name in config.json, its default · `passes`: how sequences are computed · `transposed`: whether
linears are stored `[in, out]` · `refused`: why the type cannot be used; then nothing else."""


class UnknownTypeError(UnsupportedError):
    """Nothing here tells what the tensors of a type are."""


@cache
def shipped_types() -> Mapping[str, Record]:
    """Records by `model_type`."""
    found: Mapping[str, Record] = json.loads(Path(__file__).with_name("types.json").read_text(encoding="utf-8"))
    return found


def shipped_record(config: Mapping[str, Any]) -> Record | None:
    """None for a type that is refused, or that only transformers may know."""
    found = shipped_types().get(str(config.get("model_type")), {})
    return found if "roles" in found else None


def language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the text model."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def check_type(config: Mapping[str, Any], where: str) -> None:
    """Raises UnsupportedError (78) for a type that is known not to be computed rightly here."""
    why = shipped_types().get(str(config.get("model_type")), {}).get("refused")
    if why:
        raise refused_type(config, why, where)


def describe_tensors(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], where: str) -> Architecture:
    """
    Args:
        tensors: header entries by name.

    Raises:
        UnsupportedError: (78) the type cannot be used, or nothing here tells what its tensors are.
        ModelError: (66) the tensors do not agree with config.json.
    """
    check_type(config, where)
    every = _shapes(config, tensors, where)
    # Of a layer's experts only the first is looked at.
    counts = Counter(_EXPERT_NUMBER.sub(".experts.0.", name) for name in every)
    shapes = {name: every[name] for name in counts if name in every}
    record = _find_record(config, shapes, tensors, where)
    if "refused" in record:
        raise refused_type(config, record["refused"], where)
    sizes = _Sizes(language_part(config), record["sizes"], where)
    last = sizes("num_hidden_layers", max((_layer_of(name) for name in shapes), default=-1) + 1)
    weights = [
        replace(each, count=each.count * counts[name]) if counts[name] > 1 else each
        for name, each in _weights(record, shapes, tensors, last)
    ]
    layers = {each.layer for each in weights if each.layer is not None}
    if missing := set(range(last)) - layers:
        message = f"the checkpoint has no weights of layer {min(missing)}, config.json says {last} layers"
        raise ModelError(message, where=where, fix=MISMATCH)
    experts = [each.count for each in weights if each.role == "routed_expert"]
    return Architecture(
        str(config.get("model_type")), sizes("hidden_size"), last, sizes("vocab_size"), sizes("num_attention_heads"),
        tuple(weights), _cache_size(weights, sizes, is_packed=record["passes"] == "packed"), tuple(record["targets"]),
        num_experts=max(experts, default=0), experts_per_token=sizes("num_experts_per_tok") if experts else 0,
        passes=record["passes"],
    )  # fmt: skip


def refused_type(config: Mapping[str, Any], why: str, where: str) -> UnsupportedError:
    """The one line for a type that Orbit does not train."""
    kind = config.get("model_type")
    return UnsupportedError(f"models of type {kind}{REFUSED}{why}", where=where, fix=ANOTHER)


def _shapes(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], where: str) -> dict[str, tuple[int, ...]]:
    """Module, or parameter of its own → shape of its weight, whatever the layout of its codes."""
    quant = parse_quantization(config, where=where, tensors=tensors)
    placed = {name: (where, info) for name, info in tensors.items()}
    linears = {} if quant.name == "BF16" else read_linears(placed, quant, config=where)
    parts = {part for linear in linears.values() for part in linear.tensors}
    found = {name.removesuffix(".weight"): info.shape for name, info in tensors.items() if name not in parts}
    return found | {name: (linear.rows, linear.columns) for name, linear in linears.items()}


def matrices(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], tensors: Container[str]
) -> dict[str, str]:
    """Module with `*` for each number → the first tensor of the language model's matrices that are called so."""
    last = language_part(config).get("num_hidden_layers")
    has_tower = any("language_model." in name for name in shapes)
    return {
        pattern_of(name): name if name in tensors else f"{name}.weight"
        for name in reversed(list(shapes))
        if len(shapes[name]) > 1 and _is_text(name, has_tower) and not _is_mtp(name, last)
    }


def _find_record(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], tensors: Container[str], where: str
) -> Record:
    """The shipped record if it names every matrix of the checkpoint, else one made for the checkpoint's names."""
    shipped = shipped_record(config)
    firsts = matrices(config, shapes, tensors)
    if shipped and firsts.keys() <= shipped["roles"].keys():
        return shipped
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise UnknownTypeError(
            f"unknown: nothing here says what the tensors of this {config.get('model_type')} are, such as "
            f"{next(iter(firsts.values()), 'any')}",
            where=where,
            fix="ask where torch is installed (pip install 'orbit-rl[train]'): transformers says it",
        )
    return _made_record({"config": dict(config), "names": sorted(firsts.values())}, where)


def _made_record(asked: dict[str, Any], where: str) -> Record:
    # The operator, which reads shipped records only, has no object store's library.
    from orbit_runtime.storage.cache import Cache, default_cache

    text = json.dumps([VERSION, version("transformers"), asked], sort_keys=True)
    key, kept = hashlib.sha256(text.encode()).hexdigest(), Cache(default_cache(os.environ))
    with suppress(OSError):
        if known := kept.load_listing(key):
            return known  # type: ignore[no-any-return]
    command = [sys.executable, "-P", "-m", "orbit_runtime.policy.module_tree"]
    try:
        ended = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=SECONDS)
        record: Record = json.loads(ended.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        raise UnknownTypeError(
            "unknown: transformers could not be asked what the tensors of this model are",
            where=where,
            fix=f"see what `python {' '.join(command[1:])}` says there",
        ) from None
    with suppress(OSError):
        kept.save_listing(key, record)
    return record


class _Sizes:
    """Sizes of a configuration, by transformers' usual names."""

    def __init__(self, config: Mapping[str, Any], names: Mapping[str, Any], where: str) -> None:
        self._config, self._names, self._where = config, names, where

    def __call__(self, name: str, default: int | None = None) -> int:
        """Raises `ModelError` if config.json says nothing and transformers has no default."""
        known, usual = self._names.get(name, (name, None))
        value = self._config.get(known)
        value = usual if value is None else value
        value = default if value is None else value
        # A list has one for each layer.
        value = max(value) if isinstance(value, list) and value else value
        if not isinstance(value, int):
            said = f"the configuration of this model has no {known}" if value is None else f"{known} is {value!r}"
            raise ModelError(said, where=self._where)
        return value


def _weights(
    record: Record, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, TensorInfo], last: int
) -> Iterator[tuple[str, Weight]]:
    """Yields each with its name in `shapes`.

    Args:
        last: number of decoder layers; any behind them only predict further tokens ahead.
    """
    has_tower = any("language_model." in name for name in shapes)
    for name, shape in shapes.items():
        role, *targets = record["roles"].get(pattern_of(name), "norm" if len(shape) < 2 else "other").split()
        if not _is_text(name, has_tower):
            role, targets = "vision", []
        elif _is_mtp(name, last):
            role = "mtp"
        general = _EXPERT_NUMBER.sub(f".experts.{EXPERT}.", name)
        layer = -1 if role in ("mtp", "vision") else _layer_of(name)
        count, shape = (shape[0], shape[1:]) if len(shape) == 3 and role == "routed_expert" else (1, shape)
        if record["transposed"] and targets and role != "head":
            shape = shape[::-1]
        suffix = ".weight" if f"{name}.weight" in tensors or (targets and name not in tensors) else ""
        yield name, Weight(
            general + suffix, shape, role, None if layer < 0 else layer, count,
            input=_input(general, targets[0]) if targets else "", target=" ".join(targets), is_split=bool(targets),
        )  # fmt: skip


def pattern_of(name: str) -> str:
    """A module's name with `*` for each number."""
    return _NUMBER.sub("*", name.removesuffix(".weight"))


def _is_text(name: str, has_tower: bool) -> bool:
    """Args: has_tower: whether the checkpoint tells its language model from what is beside it."""
    return not has_tower or "language_model." in name or name.startswith("lm_head")


def _is_mtp(name: str, last: int | None) -> bool:
    """Whether it only predicts further tokens ahead: beside the decoder, or in layers behind the last one."""
    return name.startswith(("mtp.", "model.mtp.")) or (last is not None and _layer_of(name) >= last)


def _layer_of(name: str) -> int:
    """Number of the decoder layer; -1 if it is in none."""
    place = _LAYER.search(f".{name}.")
    return int(place.group(1)) if place else -1


def _input(module: str, target: str) -> str:
    """Name of a linear's input, the same for siblings that adapters give one rotation."""
    is_shared = any(target in each for each in SHARED_INPUTS)
    return f"{module.rpartition('.')[0]}.in" if is_shared else f"{module}.own"


def split_targets(stored: StoredWeight) -> list[StoredWeight]:
    """One for each target of a tensor that holds the rows of several, as gate and up of all experts do."""
    weight, targets = stored.weight, stored.weight.target.split()
    if len(targets) < 2:
        return [stored]
    rows, parent = weight.shape[0] // len(targets), weight.name.rpartition(".")[0]
    return [
        replace(
            stored,
            weight=replace(weight, name=f"{parent}.{each}", shape=(rows, *weight.shape[1:]), target=each),
            num_bytes=stored.num_bytes // len(targets),
        )
        for each in targets
    ]


def _cache_size(weights: Sequence[Weight], sizes: _Sizes, *, is_packed: bool) -> KVCacheSize:
    """Of latent attention (MLA) the latents, of other attention all keys and values, of other mixers their states."""
    heads = sizes("num_attention_heads")
    rows: dict[int | None, dict[str, int]] = {}
    for each in weights:
        if each.role == "attention":
            rows.setdefault(each.layer, {})[each.target] = each.shape[0]
    if latent := sizes("kv_lora_rank", 0):
        rotary, index = sizes("qk_rope_head_dim"), sizes("index_head_dim", 0)
        kept, indexed = len(rows) * (latent + rotary), len({each.layer for each in weights if ".indexer." in each.name})
        widest = max(sizes("qk_nope_head_dim") + rotary, sizes("v_head_dim"))
        own = 2 * len(rows) * heads * widest if is_packed else kept + indexed * index
        return KVCacheSize(2 * kept + indexed * (index + INDEX_SCALE_BYTES), own_bytes_per_token=2 * own)
    size = max(sizes("head_dim", sizes("hidden_size") // heads), sizes("global_head_dim", 0))
    state, kept = max(sizes(name, 0) for name in STATES), 0
    for found in rows.values():
        keys = found.get("k_proj", 0)
        # One projection of all three has the rows of the queries too. Keys are attended to, and kept, for each expert
        # that makes queries.
        joined = (
            found.get("kv_proj", 0) * sizes("num_experts_per_tok", 1)
            or max(0, max(found.values()) - heads * size)
            or 2 * heads * size
        )
        kept += keys + found.get("v_proj", keys) if keys else joined
    convolutions = [each for each in weights if each.layer is not None and len(each.shape) == 3 and each.shape[1] == 1]
    mixing = {each.layer for each in convolutions}
    held = sum(each.shape[0] * each.shape[2] for each in convolutions)
    held += sum(
        each.shape[1] * (state if each.target == "out_proj" else 1)
        for each in weights
        if each.layer in mixing and each.target in ("out_proj", "linear_out")
    )
    return KVCacheSize(2 * kept, heads=sizes("num_key_value_heads", heads), state_bytes=held * STATE_BYTES)
