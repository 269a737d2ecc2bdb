"""`orbit convert`: writes a checkpoint in another format, and reports the error module by module.

BF16 → any format that Orbit writes; any format that Orbit reads → BF16, which is exact. A packed model is never
quantised again, as its values would be rounded twice.

Belongs here: the checks, the order, the report. Does not belong here: rows (`rewrite`), files (`destination`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from orbit_runtime.checkpoints.destination import Destination, file_digest, opened
from orbit_runtime.checkpoints.rewrite import Rewrite, RewriteItem, Stack, find_stacks, normal_rms, split_shards
from orbit_runtime.checkpoints.target import (
    Target,
    build_config,
    check_groups,
    choose_modules,
    quantization_block,
)
from orbit_runtime.checkpoints.tensor_files import ShardWriter, TensorSource
from orbit_runtime.errors import UnsupportedError, UsageError
from orbit_runtime.model_info.checkpoint import folder_headers
from orbit_runtime.model_info.headers import read_header
from orbit_runtime.model_info.layouts import check_head, read_linears
from orbit_runtime.model_info.quantization import parse_quantization
from orbit_runtime.quant.fp8_block import BLOCK

SHARD_BYTES = 5 * 10**9
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

Show = Callable[[int, int, str], None]
"""(bytes of the source done, total bytes, current activity)."""


@dataclass(frozen=True, slots=True)
class ModuleSummary:
    """Modules of one name, regardless of layer and expert numbers."""

    modules: str
    count: int
    relative_rms: float
    """Mean over the modules."""
    worst_rms: float
    worst_module: str
    max_error: float


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """The result of a conversion."""

    folder: str
    precision: str
    layout: str
    bytes_before: int
    bytes_after: int
    files: int
    modules: Mapping[str, Mapping[str, float]]
    """Module → `relative_rms`, `max_error`, `max_weight`."""
    left_alone: tuple[str, ...]
    """Matrices that kept their format, without layer numbers."""
    reused: int
    """Number of shards that an earlier start had written."""
    note: str = ""
    """What the format does not suit, and what was done about it."""
    normal_rms: float | None = None
    """See the function of this name; None where nothing is rounded."""

    def summaries(self) -> list[ModuleSummary]:
        return summarise(self.modules)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "summary": [asdict(each) for each in self.summaries()]}


def convert(
    source: Path, folder: Path, target: Target, *, show: Show, shard_bytes: int = SHARD_BYTES, is_default: bool = False
) -> ConversionResult:
    """Writes the model of `source` into `folder`.

    Args:
        is_default: nobody chose the target's layout, so another of its precision may suit the model better.

    Raises:
        ModelError: the source is damaged.
        UnsupportedError: this source cannot become this target.
        OutputError, StorageError: the folder holds something else; the disk is full.
    """
    rewrite, config = prepare(source, target)
    if rewrite.linears and target.layout != "BF16":
        raise UnsupportedError(
            f"the model is packed already ({next(iter(rewrite.linears.values())).layout}): quantising it again would "
            "round twice",
            where=str(source),
            fix=f"convert its BF16 original to {target.precision}, or this one to BF16, which is exact",
        )
    if not rewrite.linears and target.layout == "BF16":
        config = {key: "bfloat16" if key in ("dtype", "torch_dtype") else value for key, value in config.items()}
    if not rewrite.linears and not rewrite.quantised:
        raise UsageError("the model is BF16 already", where="--precision", fix="name another format")
    note = ""
    if target.layout in ("FP8Block", "FP8BlockCT"):
        partial_of = sorted(name for name in rewrite.quantised if any(side % BLOCK for side in rewrite.shape(name)))
        what = f"blocks of {BLOCK} x {BLOCK} do not divide {len(partial_of)} of {len(rewrite.quantised)} modules"
        if partial_of and is_default:
            target = replace(target, layout="FP8")
            rewrite = replace(rewrite, target=target)
            note = f"{what}, such as {partial_of[0]}: every row has a scale of its own"
        elif partial_of:
            note = f"{what}, such as {partial_of[0]}: other programs may refuse them; `--layout FP8` suits all"
    result = write(rewrite, config, folder, {"kind": "convert"}, show=show, shard_bytes=shard_bytes)
    return replace(result, note=note, normal_rms=None if target.layout == "BF16" else normal_rms(target))


def prepare(source: Path, target: Target) -> tuple[Rewrite, Mapping[str, Any]]:
    """Reads the source's headers, and decides what to do with each module."""
    headers = folder_headers(source)
    config_file = f"{source}/config.json"
    quant = parse_quantization(headers.config, where=config_file, tensors=headers.infos())
    linears = read_linears(headers.tensors, quant, config=config_file)
    check_head(headers.config, linears, config_file)
    tensors = TensorSource(source)
    stacks = find_stacks(headers.config, tensors, linears)
    if target.layout != "BF16":
        check_writable(stack for stack in stacks.values() if stack.layout != "BF16")
    packed = {name for linear in linears.values() for name in linear.tensors}
    dense = {name: info for name, (_, info) in tensors.tensors.items() if name not in packed}
    # In a changed packed model, packed modules are packed again; all others stay as they are.
    packs_again = bool(linears) and target.layout != "BF16"
    chosen = list(linears) if packs_again else choose_modules(headers.config, dense, target)
    columns = {name: linears[name].columns if name in linears else dense[f"{name}.weight"].shape[1] for name in chosen}
    check_groups(columns, target)
    return Rewrite(tensors, linears, target, frozenset(chosen), stacks), headers.config


def check_writable(stacks: Iterable[Stack]) -> None:
    """Raises `UnsupportedError` for the first one: stacks are written in BF16 only."""
    for stack in stacks:
        raise UnsupportedError(
            "all experts of the layer are in one tensor, which Orbit writes in BF16 only",
            where=stack.module,
            fix="write BF16 (--precision BF16), or use the model as it is",
        )


def write(
    rewrite: Rewrite, config: Mapping[str, Any], folder: Path, facts: Mapping[str, Any], *, show: Show, shard_bytes: int
) -> ConversionResult:
    """Writes the output of `rewrite`, or the part that an earlier start of it did not write."""
    items = rewrite.items()
    shards = split_shards(items, shard_bytes)
    names = [shard_name(number, len(shards)) for number in range(len(shards))]
    source, target = rewrite.source.folder, rewrite.target
    left_alone = _left_alone(items)
    described = {
        **facts,
        "source": _source_identity(rewrite.source),
        "target": asdict(target),
        "shards": [[item.name for item in shard] for shard in shards],
    }
    identity = f"sha256:{hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()}"
    total, before, reused = sum(item.source_bytes for item in items), 0, 0
    with opened(folder, identity) as destination:
        if destination.finished is None:
            todo = sum(item.num_bytes for name, shard in zip(names, shards, strict=True)
                       if name not in destination.done for item in shard)  # fmt: skip
            destination.check_room(todo)
            for name, shard in zip(names, shards, strict=True):
                size = sum(item.source_bytes for item in shard)
                if destination.is_done(name):
                    reused += 1
                else:
                    _write_shard(rewrite, destination, name, shard, partial(_show_from, before, total, show))
                before += size
                show(before, total, name)
            block = quantization_block(target, sorted({n.removesuffix(".weight") for n in _plain_matrices(items)}))
            modules = {m: d for name in names for m, d in destination.done[name]["modules"].items()}
            recorded = {
                **facts, "precision": target.precision, "layout": target.layout, "group_size": target.group,
                "source": str(source), "modules": modules,
            }  # fmt: skip
            destination.finish(source, build_config(config, block), _index(names, shards), recorded)
        else:
            modules, reused = destination.finished["modules"], len(shards)
        files = len(list(folder.glob("*.safetensors")))
    return ConversionResult(
        str(folder), target.precision, target.layout, total, sum(item.num_bytes for item in items), files, modules,
        left_alone, reused,
    )  # fmt: skip


def _show_from(base: int, total: int, show: Show, at: int, what: str) -> None:
    show(base + at, total, what)


def _index(names: list[str], shards: list[list[RewriteItem]]) -> dict[str, Any]:
    """`model.safetensors.index.json`."""
    placed = [(output, name) for name, shard in zip(names, shards, strict=True) for i in shard for output in i.outputs]
    return {
        "metadata": {"total_size": sum(output.num_bytes for output, _ in placed)},
        "weight_map": {output.name: name for output, name in placed},
    }


def _write_shard(
    rewrite: Rewrite, destination: Destination, name: str, shard: list[RewriteItem], show: Callable[[int, str], None]
) -> None:
    at, modules = 0, {}

    def advance(count: int, what: str) -> None:
        nonlocal at
        at += count
        show(at, what)

    with ShardWriter(destination.folder / name, [output for item in shard for output in item.outputs]) as writer:
        for item in shard:
            deviation = rewrite.write(item, writer, advance)
            if deviation is not None:
                modules[item.name] = deviation.to_json()
    destination.keep_shard(name, modules)


def shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"


def summarise(modules: Mapping[str, Mapping[str, float]]) -> list[ModuleSummary]:
    """Groups by name, largest error first."""
    groups: dict[str, list[str]] = {}
    for module in modules:
        groups.setdefault(_NUMBER.sub("*", module), []).append(module)
    found = []
    for pattern, names in groups.items():
        worst = max(names, key=lambda name: modules[name]["relative_rms"])
        mean = sum(modules[name]["relative_rms"] for name in names) / len(names)
        largest = max(modules[name]["max_error"] for name in names)
        found.append(ModuleSummary(pattern, len(names), mean, modules[worst]["relative_rms"], worst, largest))
    return sorted(found, key=lambda each: -each.relative_rms)


def _plain_matrices(items: list[RewriteItem]) -> list[str]:
    """Tensors that look like a linear's weight but were copied, and modules that became BF16."""
    copied = [item.name for item in items if item.layout is None and _is_matrix(item)]
    return copied + [item.name for item in items if item.layout == "BF16"]


def _is_matrix(item: RewriteItem) -> bool:
    name = item.name
    dense = item.outputs[0].dtype in ("BF16", "F16", "F32")
    return dense and name.endswith(".weight") and len(item.outputs[0].shape) == 2 and "embed" not in name


def _left_alone(items: list[RewriteItem]) -> tuple[str, ...]:
    names = (_NUMBER.sub("*", item.name.removesuffix(".weight")) for item in items
             if item.layout is None and len(item.outputs[0].shape) > 1)  # fmt: skip
    return tuple(dict.fromkeys(names))


def _source_identity(source: TensorSource) -> dict[str, Any]:
    """Identifies a source without reading every byte: headers, sizes, times, and config.json itself."""
    files = sorted({path for path, _ in source.tensors.values()})
    facts: dict[str, Any] = {
        path.name: [path.stat().st_size, path.stat().st_mtime_ns, sorted(read_header(path).tensors)] for path in files
    }
    facts["config.json"] = file_digest(source.folder / "config.json")
    return facts
