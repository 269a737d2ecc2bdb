"""Checks the headers of packed weights, layout by layout, before any tensor is read.

Belongs here: names, dtypes and shapes of one module's tensors, and detecting modules that violate them. Does not belong
here: values (scales of 0, bits past the end: `quant` checks those), the meaning of a config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orbit_runtime.errors import ModelError
from orbit_runtime.model_info.headers import TensorInfo
from orbit_runtime.model_info.quantization import QuantFormat

DAMAGED = "the file is damaged or mislabelled: download the model again"
FLOATS = ("F32", "BF16", "F16")
PACKED_DTYPES = ("F8_E4M3", "F8_E5M2", "U8", "I8", "F4", "I32")
PACKED_ENDINGS = (".weight_packed", ".qweight", "_blocks")
SCALE_ENDINGS = (
    ".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_global_scale", ".weight_zero_point",
    ".weight_shape", ".qzeros", ".scales", ".g_idx",
)  # fmt: skip
"""Endings that are useless without the codes they belong to."""
FP8_SCALES = {"FP8Block": ".weight_scale_inv", "FP8BlockCT": ".weight_scale", "FP8BlockV4": ".scale"}

Tensors = Mapping[str, tuple[Path | str, TensorInfo]]
"""Tensor → (file, header entry)."""


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """A packed weight as described by its headers."""

    module: str
    layout: str
    rows: int
    columns: int
    group: int | None
    """Columns under one scale; None if a scale covers whole rows, blocks or the tensor."""
    tensors: tuple[str, ...]
    experts: int = 1
    """Number of experts, for gpt-oss: all of a layer are in one tensor; `rows` counts those of one expert."""


@dataclass(frozen=True, slots=True)
class _Module:
    """One module's tensors, and the checks that every layout needs."""

    name: str
    tensors: Tensors

    def get(self, ending: str, dtypes: Sequence[str], sizes: Sequence[int] | None = None) -> tuple[int, ...]:
        """The shape of a required tensor; `sizes` per dimension, -1 for any."""
        key = self.name + ending
        if key not in self.tensors:
            raise ModelError("the tensor is missing from the checkpoint", where=key, fix=DAMAGED)
        info = self.tensors[key][1]
        shape = info.shape
        fits = sizes is None or (
            len(shape) == len(sizes) and all(size in (-1, found) for size, found in zip(sizes, shape, strict=True))
        )
        if info.dtype not in dtypes or not fits or 0 in shape:
            wanted = "" if sizes is None else f" [{', '.join('any' if size < 0 else str(size) for size in sizes)}]"
            raise self.error(f"expected {' or '.join(dtypes)}{wanted}, found {info.dtype} {list(shape)}", ending)
        return shape

    def error(self, message: str, ending: str, fix: str = DAMAGED) -> ModelError:
        key = self.name + ending
        return ModelError(message, where=f"{self.tensors[key][0]}: {key}", fix=fix)

    def groups(self, columns: int, groups: int, ending: str, multiple: int) -> int:
        if columns % groups or (columns // groups) % multiple:
            raise self.error(f"{groups} scales a row do not fit {columns} columns", ending)
        return columns // groups


def read_linear(layout: str, module: str, tensors: Tensors) -> StoredLinear:
    """Raises `ModelError` naming file and tensor if something is missing or of another kind or shape."""
    return _LAYOUTS[layout](_Module(module, tensors), layout)


def _int4(module: _Module, layout: str) -> StoredLinear:
    rows, words = module.get(".weight_packed", ("I32",), (-1, -1))
    zeros = layout == "INT4Asymmetric"
    _, groups = module.get(".weight_scale", FLOATS if zeros else ("BF16",), (rows, -1))
    module.get(".weight_shape", ("I32", "I64"), (2,))
    group = module.groups(words * 8, groups, ".weight_scale", 8)
    endings = [".weight_packed", ".weight_scale", ".weight_shape"]
    if zeros:
        module.get(".weight_zero_point", ("I32",), (-(-rows // 8), groups))
        endings.append(".weight_zero_point")
    return _linear(module, layout, (rows, words * 8), group, endings)


def _gptq(module: _Module, layout: str) -> StoredLinear:
    words, rows = module.get(".qweight", ("I32",), (-1, -1))
    groups, _ = module.get(".scales", ("F16", "BF16"), (-1, rows))
    module.get(".qzeros", ("I32",), (groups, rows // 8))
    module.get(".g_idx", ("I32", "I64"), (words * 8,))
    group = module.groups(words * 8, groups, ".scales", 8)
    return _linear(module, layout, (rows, words * 8), group, (".qweight", ".qzeros", ".scales", ".g_idx"))


def _awq(module: _Module, layout: str) -> StoredLinear:
    columns, words = module.get(".qweight", ("I32",), (-1, -1))
    groups, _ = module.get(".scales", ("F16", "BF16"), (-1, words * 8))
    module.get(".qzeros", ("I32",), (groups, words))
    group = module.groups(columns, groups, ".scales", 8)
    return _linear(module, layout, (words * 8, columns), group, (".qweight", ".qzeros", ".scales"))


def _fp8(module: _Module, layout: str) -> StoredLinear:
    rows, columns = module.get(".weight", ("F8_E4M3",), (-1, -1))
    shape = module.get(".weight_scale", FLOATS)
    if shape not in ((), (1,), (1, 1), (rows,), (rows, 1)):
        message = f"expected one scale, or one for each of {rows} rows, found {list(shape)}"
        raise module.error(message, ".weight_scale")
    return _linear(module, layout, (rows, columns), None, (".weight", ".weight_scale"))


def _fp8_block(module: _Module, layout: str) -> StoredLinear:
    rows, columns = module.get(".weight", ("F8_E4M3",), (-1, -1))
    module.get(FP8_SCALES[layout], ("F32", "BF16", "F8_E8M0"), (-(-rows // 128), -(-columns // 128)))
    return _linear(module, layout, (rows, columns), None, (".weight", FP8_SCALES[layout]))


def _nvfp4(module: _Module, layout: str) -> StoredLinear:
    code, scale, factor = (
        (".weight_packed", ".weight_scale", ".weight_global_scale")
        if layout == "NVFP4"
        else (".weight", ".weight_scale", ".weight_scale_2")
    )
    rows, half = module.get(code, ("U8",), (-1, -1))
    _check_whole(module, half * 2, 16, code)
    module.get(scale, ("F8_E4M3",), (rows, half // 8))
    if module.get(factor, ("F32",)) not in ((), (1,)):
        raise module.error("expected one scale for the tensor", factor)
    return _linear(module, layout, (rows, half * 2), 16, (code, scale, factor))


def _mxfp4(module: _Module, layout: str) -> StoredLinear:
    codes, scales, kinds = (
        (".weight_packed", ".weight_scale", ("U8", "U8"))
        if layout == "MXFP4"
        else (".weight", ".scale", ("I8", "F8_E8M0"))
    )
    rows, half = module.get(codes, kinds[:1], (-1, -1))
    _check_whole(module, half * 2, 32, codes)
    module.get(scales, kinds[1:], (rows, half // 16))
    return _linear(module, layout, (rows, half * 2), 32, (codes, scales))


def _gpt_oss(module: _Module, layout: str) -> StoredLinear:
    experts, rows, groups, _ = module.get("_blocks", ("U8",), (-1, -1, -1, 16))
    module.get("_scales", ("U8",), (experts, rows, groups))
    return _linear(module, layout, (rows, groups * 32), 32, ("_blocks", "_scales"), experts)


_LAYOUTS: dict[str, Callable[[_Module, str], StoredLinear]] = {
    "INT4": _int4, "INT4Asymmetric": _int4, "GPTQ": _gptq, "GPTQv2": _gptq, "AWQ": _awq, "FP8": _fp8,
    "FP8Block": _fp8_block, "FP8BlockCT": _fp8_block, "FP8BlockV4": _fp8_block, "NVFP4": _nvfp4,
    "NVFP4ModelOpt": _nvfp4, "MXFP4": _mxfp4, "MXFP4V4": _mxfp4, "MXFP4GptOss": _gpt_oss,
}  # fmt: skip


def read_linears(tensors: Tensors, quant: QuantFormat, *, config: str) -> dict[str, StoredLinear]:
    """Every packed module of a checkpoint, in the order of the tensors' names.

    Args:
        config: the file that `quant` was read from, for messages.

    Raises:
        ModelError: a module's tensors do not match its layout, each other, or the config.
    """
    linears: dict[str, StoredLinear] = {}
    for name in sorted(tensors):
        module, ending = packed_module(name, tensors[name][1])
        if module is None:
            continue
        where = f"{tensors[name][0]}: {name}"
        if module in linears or (ending != ".weight" and f"{module}.weight" in tensors):
            raise ModelError(f"{module} has two weights: packed and plain tensors", where=where, fix=DAMAGED)
        layout = quant.layout_of(module)
        if layout == "BF16":
            raise ModelError(
                f"the tensor is {tensors[name][1].dtype}, but {config} leaves {module} in BF16",
                where=where,
                fix="copy config.json and the weights from the same place",
            )
        linear = read_linear(layout, module, tensors)
        _check_group(linear, quant, where)
        linears[module] = linear
    _check_strays(tensors, linears)
    return linears


def check_head(config: Mapping[str, Any], linears: Mapping[str, StoredLinear], where: str) -> None:
    """A packed head cannot also be the embedding. Raises `ModelError` if the config says so."""
    if config.get("tie_word_embeddings") and "lm_head" in linears:
        raise ModelError(
            "the output head lm_head is quantised, but the config ties it to the embedding",
            where=where,
            fix="set tie_word_embeddings to false there, or use a checkpoint whose head is not quantised",
        )


def packed_module(name: str, info: TensorInfo) -> tuple[str | None, str]:
    """The module whose codes this tensor holds, and the ending of the tensor's name; None for any other tensor."""
    for ending in PACKED_ENDINGS:
        if name.endswith(ending):
            return name.removesuffix(ending), ending
    if name.endswith(".weight") and info.dtype in PACKED_DTYPES:
        return name.removesuffix(".weight"), ".weight"
    return None, ""


def _check_group(linear: StoredLinear, quant: QuantFormat, where: str) -> None:
    """The config's group size is that of the main layout; a file must not use another one."""
    if quant.group_size is None or linear.group is None or linear.layout != (quant.layout or quant.name):
        return
    if linear.columns % quant.group_size:
        raise ModelError(
            f"{linear.columns} columns are not a multiple of the config's group of {quant.group_size}",
            where=where,
            fix="use another checkpoint",
        )
    if linear.group != quant.group_size:
        raise ModelError(
            f"the scales are for groups of {linear.group}, the config says {quant.group_size}",
            where=where,
            fix="copy config.json and the weights from the same place",
        )


def _check_strays(tensors: Tensors, linears: Mapping[str, StoredLinear]) -> None:
    for name in sorted(tensors):
        for ending in SCALE_ENDINGS:
            module = name.removesuffix(ending)
            if name.endswith(ending) and module not in linears:
                raise ModelError(
                    f"a part of a packed weight, but there are no codes of {module}",
                    where=f"{tensors[name][0]}: {name}",
                    fix=DAMAGED,
                )


def _check_whole(module: _Module, columns: int, group: int, ending: str) -> None:
    if columns % group:
        message = f"{columns} columns are not a multiple of the group of {group}"
        raise module.error(message, ending, "use another checkpoint")


def _linear(
    module: _Module,
    layout: str,
    shape: tuple[int, int],
    group: int | None,
    endings: Sequence[str],
    experts: int = 1,
) -> StoredLinear:
    names = tuple(module.name + ending for ending in endings)
    return StoredLinear(module.name, layout, *shape, group, names, experts)
