"""Rewrites a checkpoint module by module, a run of rows at a time: the common core of convert and merge.

At any time, only one run of rows is dense, besides the packed bytes of the current module, so peak memory is far below
one layer; of experts in one tensor, one expert is. The contents of a file are known before its first value is computed,
so its header is written first.

Belongs here: the order of reading, computing and writing; errors of the new format.
Does not belong here: complete and partial files (`destination`), the choice of modules (`target`), adapters (`deltas`).

All experts of a layer may be one tensor, as in gpt-oss:
BF16     `….experts.gate_up_proj` `[E, K, N]`: x times it, so each expert's weight is turned
MXFP4    `….experts.gate_up_proj_blocks` `[E, N, K/32, 16]`, `…_scales` `[E, N, K/32]`
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from orbit_runtime.checkpoints.target import Target
from orbit_runtime.checkpoints.tensor_files import CODES, Output, ShardWriter, TensorSource
from orbit_runtime.errors import ModelError
from orbit_runtime.model_info.layouts import StoredLinear
from orbit_runtime.model_info.weights import SHARED_INPUTS
from orbit_runtime.quant.formats import FORMATS, Codec

RUN_ELEMENTS = 1 << 18
"""Elements of a run of rows, unless the layout's tiles are higher; temporaries take about 30 bytes per element."""
MEASURED_ELEMENTS = 1 << 16
"""Elements of a run that are compared with the result at once, in fp64, which takes 20 bytes per element."""

Advance = Callable[[int, str], None]
"""(bytes of the source done, current activity)."""


class WeightChange(Protocol):
    """An adapter's change to weights."""

    def modules(self) -> frozenset[str]: ...

    def apply(self, module: str, rows: Tensor, start: int) -> Tensor:
        """fp32 rows `[start, start + n)` of the weight of `module` → the changed rows."""


@dataclass(slots=True)
class Deviation:
    """Difference of one module's written weights from the intended ones."""

    squares: float = 0.0
    reference: float = 0.0
    largest: float = 0.0
    largest_weight: float = 0.0

    def add(self, written: Tensor, wanted: Tensor) -> None:
        for became, was in zip(*(each.reshape(-1).split(MEASURED_ELEMENTS) for each in (written, wanted)), strict=True):
            difference = became - was
            self.squares += float(difference.double().square().sum())
            self.reference += float(was.double().square().sum())
            self.largest = max(self.largest, float(difference.abs().max()))
            self.largest_weight = max(self.largest_weight, float(was.abs().max()))

    def to_json(self) -> dict[str, float]:
        """`relative_rms`: |written - wanted| / |wanted|; `max_error`, `max_weight`: largest magnitudes."""
        rms = math.sqrt(self.squares / self.reference) if self.reference else 0.0
        return {"relative_rms": rms, "max_error": self.largest, "max_weight": self.largest_weight}


def normal_rms(target: Target) -> float:
    """Relative RMS error of normally distributed weights: what a module of any model loses to the format alone."""
    codec, deviation = FORMATS[target.layout], Deviation()
    assert codec.quantize is not None
    wanted = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    deviation.add(codec.dequantize(codec.quantize(wanted, *target.arguments), torch.float32), wanted)
    return deviation.to_json()["relative_rms"]


@dataclass(frozen=True)
class RewriteItem:
    """One tensor or module of the source: what happens to it, and its form in the file."""

    name: str
    """The module's name if it is computed, the tensor's if it is copied."""
    outputs: tuple[Output, ...]
    source_bytes: int
    layout: str | None = None
    """The layout in which the module is written; None if the tensor is copied."""

    @property
    def num_bytes(self) -> int:
        return sum(output.num_bytes for output in self.outputs)


@dataclass
class Rewrite:
    """One source, one target, and at most one change."""

    source: TensorSource
    linears: Mapping[str, StoredLinear]
    """The packed modules of the source."""
    target: Target
    quantised: frozenset[str]
    """Modules to write in the target's layout."""
    stacks: Mapping[str, Stack] = field(default_factory=dict)
    """Modules that hold all experts of a layer in one tensor. They are copied, or written in BF16."""
    change: WeightChange | None = None
    _amax: dict[str, Tensor] = field(default_factory=dict)

    def items(self) -> list[RewriteItem]:
        """All items to be written, in the order of the source's bytes."""
        changed = self.change.modules() if self.change else frozenset()
        computed = self.quantised | changed
        part_of = {tensor: linear.module for linear in self.linears.values() for tensor in linear.tensors}
        stack_of = {
            tensor: stack
            for stack in self.stacks.values()
            if stack.module in self.linears or changed.intersection(stack.experts())
            for tensor in stack.tensors
        }
        items: dict[str, RewriteItem] = {}
        sizes: dict[str, int] = {}
        for name in self.source.in_order():
            info = self.source.tensors[name][1]
            module = part_of.get(name) or name.removesuffix(".weight")
            if name in stack_of:
                stack = stack_of[name]
                sizes[stack.module] = sizes.get(stack.module, 0) + info.num_bytes
                outputs = (Output(stack.module, "BF16", stack.shape),)
                items[stack.module] = RewriteItem(stack.module, outputs, sizes[stack.module], "BF16")
            elif name in part_of and module in self.quantised and self._stays(module):
                items[name] = RewriteItem(name, (Output(name, info.dtype, info.shape),), info.num_bytes)
            elif name in part_of or (name.endswith(".weight") and module in computed):
                sizes[module] = sizes.get(module, 0) + info.num_bytes
                items[module] = self._computed(module, sizes[module])
            else:
                items[name] = RewriteItem(name, (Output(name, info.dtype, info.shape),), info.num_bytes)
        return list(items.values())

    def write(self, item: RewriteItem, writer: ShardWriter, advance: Advance) -> Deviation | None:
        """Writes one item; returns the deviation if the module was computed."""
        if item.layout is None:
            for offset, count in self.source.blocks(item.name):
                writer.write_bytes(item.name, offset, self.source.raw(item.name, offset, count))
            advance(item.source_bytes, item.name)
            return None
        if item.name in self.stacks:
            return self._write_stack(item, writer, advance)
        codec, deviation = FORMATS[item.layout], Deviation()
        shape = self.shape(item.name)
        extra = self._extra(item.name)
        share = item.source_bytes / shape[0]
        for start, wanted in self._runs(item.name):
            written = _write_run(codec, item.name, (start, wanted), (*self._arguments(item.layout), extra), writer)
            if not bool(written.isfinite().all()):
                key = self.linears[item.name].tensors[0] if item.name in self.linears else f"{item.name}.weight"
                raise ModelError(
                    f"{item.layout} cannot hold values as large as {float(wanted.abs().max()):.3g}",
                    where=self.source.where(key),
                    fix="write another format, or leave the module out with --ignore",
                )
            deviation.add(written, wanted)
            advance(round(share * (start + len(wanted))) - round(share * start), item.name)
        return deviation

    def _write_stack(self, item: RewriteItem, writer: ShardWriter, advance: Advance) -> Deviation:
        """One expert at a time, turned to `[K, N]`."""
        stack, deviation = self.stacks[item.name], Deviation()
        changed = self.change.modules() if self.change is not None else frozenset()
        share = item.source_bytes / stack.num_experts
        for expert, name in enumerate(stack.experts()):
            wanted = read_expert(self.source, stack, expert)
            self._check_finite(wanted, f"expert {expert}", stack.tensors[0])
            if self.change is not None and name in changed:
                wanted = self.change.apply(name, wanted, 0)
            written = wanted.bfloat16()
            writer.write_rows(item.name, expert, written.t())
            deviation.add(written.float(), wanted)
            advance(round(share * (expert + 1)) - round(share * expert), item.name)
        return deviation

    def _check_finite(self, values: Tensor, what: str, tensor: str) -> None:
        if not bool(values.isfinite().all()):
            raise ModelError(
                f"a value in {what} is not finite",
                where=self.source.where(tensor),
                fix="the model is damaged: download it again",
            )

    def _stays(self, module: str) -> bool:
        """Whether a packed module keeps its bytes: if unchanged, and in NVFP4 only with all that share its scale."""
        linear = self.linears[module]
        together = self._fused(module) if self.target.precision == "NVFP4" else [module]
        changed = self.change.modules() if self.change is not None else frozenset()
        same = (linear.layout, linear.group) == (self.target.layout, self.target.group)
        return same and not changed.intersection(together)

    def _fused(self, module: str) -> list[str]:
        """The modules to quantise that an engine fuses with this one, including itself."""
        parent, _, leaf = module.rpartition(".")
        group = next((group for group in SHARED_INPUTS if leaf in group), (leaf,))
        return [name for each in group if (name := f"{parent}.{each}") in self.quantised]

    def _computed(self, module: str, source_bytes: int) -> RewriteItem:
        layout = self.target.layout if module in self.quantised else "BF16"
        outputs = _outputs(layout, self.shape(module), self._arguments(layout))
        return RewriteItem(
            module, tuple(replace(each, name=f"{module}.{each.name}") for each in outputs), source_bytes, layout
        )

    def _arguments(self, layout: str) -> tuple[int, ...]:
        return self.target.arguments if layout == self.target.layout else ()

    def shape(self, module: str) -> tuple[int, int]:
        if module in self.linears:
            linear = self.linears[module]
            return linear.rows, linear.columns
        rows, columns = self.source.tensors[f"{module}.weight"][1].shape
        return rows, columns

    def _runs(self, module: str) -> Iterator[tuple[int, Tensor]]:
        """Yields (first row, fp32 rows) of the module's intended weight."""
        rows, columns = self.shape(module)
        layout = self.target.layout if module in self.quantised else "BF16"
        tile = _tile_rows(layout, self._arguments(layout))
        run = max(tile, RUN_ELEMENTS // columns // tile * tile)
        read = self._reader(module)
        for start in range(0, rows, run):
            values = read(start, min(start + run, rows))
            key = self.linears[module].tensors[0] if module in self.linears else f"{module}.weight"
            self._check_finite(values, f"rows {start} to {start + len(values) - 1}", key)
            if self.change is not None and module in self.change.modules():
                values = self.change.apply(module, values, start)
            yield start, values

    def _reader(self, module: str) -> Callable[[int, int], Tensor]:
        if module not in self.linears:
            name = f"{module}.weight"
            return lambda start, stop: self.source.read_rows(name, start, stop).float()
        linear = self.linears[module]
        codec = FORMATS[linear.layout]
        try:
            weight = codec.from_checkpoint({name: self.source.read(name) for name in linear.tensors}, module)
        except ModelError as error:
            where = self.source.where(error.where) if error.where in self.source.tensors else error.where
            raise ModelError(error.message, where=where, fix=error.fix) from None
        # GPTQ and AWQ weights have been converted to our layout by then.
        own = FORMATS[linear.layout] if linear.layout not in ("GPTQ", "GPTQv2", "AWQ") else FORMATS["INT4Asymmetric"]
        views = own.views(*own.buffers(weight).values())
        return lambda start, stop: own.dense_rows(*(view[start:stop] for view in views)).float()

    def _extra(self, module: str) -> Mapping[str, Any]:
        """NVFP4: the largest value of all projections that an engine fuses with this one."""
        if self.target.precision != "NVFP4" or module not in self.quantised:
            return {}
        members = self._fused(module)
        key = members[0]
        if key not in self._amax:
            # Numbers, not tensors: small allocations that persist between large ones keep the heap from shrinking.
            self._amax[key] = torch.tensor(
                max(float(bound.abs()) for each in members for _, rows in self._runs(each) for bound in rows.aminmax())
            )
        return {"amax": self._amax[key]}


@functools.cache
def _tile_rows(layout: str, arguments: tuple[int, ...]) -> int:
    """Most rows that one element of the layout's tensors covers, such as a word of 8 zero points; runs end there."""
    codec = FORMATS[layout]
    assert codec.quantize is not None
    weight = codec.quantize(torch.empty((128, 128), dtype=torch.bfloat16, device="meta"), *arguments)
    return max(tile[0] for tile in codec.tiles(weight).values() if tile is not None)


@functools.cache
def _outputs(layout: str, shape: tuple[int, int], arguments: tuple[int, ...]) -> tuple[Output, ...]:
    """The tensors that the codec writes for a weight of this shape, determined on meta tensors."""
    codec = FORMATS[layout]
    assert codec.quantize is not None
    assert codec.to_checkpoint is not None
    parts = codec.to_checkpoint(codec.quantize(torch.empty(shape, dtype=torch.bfloat16, device="meta"), *arguments))
    return tuple(Output(name, CODES[part.dtype], tuple(part.shape)) for name, part in parts.items())


def _write_run(
    codec: Codec, module: str, run: tuple[int, Tensor], arguments: tuple[Any, ...], writer: ShardWriter
) -> Tensor:
    """Quantises and writes a run of rows; returns the result in fp32."""
    start, wanted = run
    *positional, named = arguments
    assert codec.quantize is not None
    assert codec.to_checkpoint is not None
    weight = codec.quantize(wanted, *positional, **named)
    tiles = codec.tiles(weight)
    for name, part in codec.to_checkpoint(weight).items():
        tile = tiles.get(name)
        if name == "weight_shape":
            # A run of rows knows its own number of rows only.
            rows, words = writer.shape(f"{module}.weight_packed")
            part = torch.tensor([rows, words * 8])
        if tile is not None:
            writer.write_rows(f"{module}.{name}", start // tile[0], part)
        elif start == 0:
            writer.write_rows(f"{module}.{name}", 0, part)
    return codec.dequantize(weight, torch.float32)


def split_shards(items: Sequence[RewriteItem], limit: int) -> list[list[RewriteItem]]:
    """Items in order, in files of at most `limit` bytes; a larger item has a file of its own."""
    shards: list[list[RewriteItem]] = [[]]
    size = 0
    for item in items:
        size += item.num_bytes
        if shards[-1] and size > limit:
            shards.append([])
            size = item.num_bytes
        shards[-1].append(item)
    return shards


ENDINGS = (".experts.gate_up_proj", ".experts.down_proj")


@dataclass(frozen=True, slots=True)
class Stack:
    """The weights `[N, K]` of E experts. Example: `Stack("….experts.down_proj", 32, 2880, 2880, "BF16", …)`."""

    module: str
    num_experts: int
    rows: int
    """N."""
    columns: int
    """K."""
    layout: str
    """`BF16` or `MXFP4GptOss`."""
    tensors: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the tensor in BF16: `[E, K, N]`."""
        return self.num_experts, self.columns, self.rows

    def experts(self) -> tuple[str, ...]:
        """Names for the weights of the experts, which have none in the file."""
        return tuple(f"{self.module}.{expert}" for expert in range(self.num_experts))


def find_stacks(
    config: Mapping[str, Any], source: TensorSource, linears: Mapping[str, StoredLinear]
) -> dict[str, Stack]:
    """The checkpoint's stacks by module.

    Args:
        config: config.json.
        linears: the packed modules.
    """
    found = {
        linear.module: Stack(
            linear.module, linear.experts, linear.rows, linear.columns, linear.layout, tuple(linear.tensors)
        )
        for linear in linears.values()
        if linear.layout == "MXFP4GptOss"
    }
    if config.get("model_type") == "gpt_oss":
        for name, info in source.infos().items():
            if name.endswith(ENDINGS) and len(info.shape) == 3 and info.dtype == "BF16":
                experts, columns, rows = info.shape
                found[name] = Stack(name, experts, rows, columns, "BF16", (name,))
    return found


def read_expert(source: TensorSource, stack: Stack, expert: int) -> Tensor:
    """fp32 `[N, K]`.

    Raises:
        ModelError: the file is damaged.
    """
    parts = {name: source.read_part(name, expert) for name in stack.tensors}
    if stack.layout == "BF16":
        return parts[stack.module].t().float()
    codec = FORMATS[stack.layout]
    try:
        weight = codec.from_checkpoint({name: part.unsqueeze(0) for name, part in parts.items()}, stack.module)
    except ModelError as error:
        where = source.where(error.where) if error.where in source.tensors else error.where
        raise ModelError(error.message, where=where, fix=error.fix) from None
    dense: Tensor = codec.dequantize(weight, torch.float32)
    return dense
