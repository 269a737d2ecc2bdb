"""The format in which a checkpoint is written: the layout, the modules, and their description in config.json.

Belongs here: choosing, and describing in the vendors' terms. Does not belong here: writing (`rewrite`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orbit_runtime.errors import ModelError, UnsupportedError, UsageError
from orbit_runtime.model_info.families import FAMILIES, describe
from orbit_runtime.model_info.headers import TensorInfo
from orbit_runtime.model_info.module_tree import describe_tensors, shipped_record
from orbit_runtime.model_info.quantization import PRECISIONS
from orbit_runtime.model_info.weights import EXPERT

DEFAULT_LAYOUT = {"BF16": "BF16", "INT4": "INT4", "FP8": "FP8Block", "NVFP4": "NVFP4", "MXFP4": "MXFP4"}
WRITABLE = ("BF16", "INT4", "INT4Asymmetric", "FP8", "FP8Block", "FP8BlockCT", "NVFP4", "NVFP4ModelOpt", "MXFP4")
"""Layouts that this command writes. Only their authors make DeepSeek-V4's and gpt-oss' own layouts."""
GROUPS = {"INT4": 32, "INT4Asymmetric": 32, "NVFP4": 16, "NVFP4ModelOpt": 16, "MXFP4": 32}
"""Columns that share a scale; configurable for INT4."""
FREE_GROUP = ("INT4", "INT4Asymmetric")
DEFAULT_IGNORE = (
    "lm_head", r"re:.*embed", r"re:.*norm", r"re:.*router", r"re:.*\.gate$", r"re:.*(vision|visual|mm_projector)",
)  # fmt: skip
"""Output head, embeddings, norms, routers and vision towers stay as they are."""
QUANTISED_ROLES = ("attention", "mixer", "dense_mlp", "shared_expert", "routed_expert")


@dataclass(frozen=True, slots=True)
class Target:
    """Example: `Target("INT4", 32, ("re:.*self_attn.*",))`."""

    layout: str
    group: int | None = None
    ignore: tuple[str, ...] = ()
    """The user's patterns, in addition to `DEFAULT_IGNORE`."""

    @property
    def precision(self) -> str:
        return PRECISIONS[self.layout]

    @property
    def arguments(self) -> tuple[int, ...]:
        """Arguments of the codec's `quantize` besides the weight."""
        return (self.group,) if self.layout in FREE_GROUP and self.group else ()


def build_target(precision: str, layout: str | None, group: int | None, ignore: Sequence[str]) -> Target:
    """Raises `UsageError` for a format that cannot be written, or a group size that it does not support."""
    if precision not in DEFAULT_LAYOUT:
        known = ", ".join(DEFAULT_LAYOUT)
        raise UsageError(f"`{precision}` is not a precision", where="--precision", fix=f"one of {known}")
    chosen = layout or DEFAULT_LAYOUT[precision]
    if chosen not in WRITABLE or PRECISIONS[chosen] != precision:
        known = ", ".join(each for each in WRITABLE if PRECISIONS[each] == precision)
        raise UsageError(f"`{chosen}` is not a layout of {precision}", where="--layout", fix=f"one of {known}")
    size = GROUPS.get(chosen)
    if group is not None and group != size:
        if chosen not in FREE_GROUP:
            raise UsageError(f"{chosen} has no group size to choose", where="--group-size", fix="leave it out")
        if group <= 0 or group % 8:
            raise UsageError(f"groups of {group} cannot be packed", where="--group-size", fix="choose 32 or 128")
        size = group
    for pattern in ignore:
        try:
            re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            raise UsageError(f"`{pattern}` is not a regular expression: {error}", where="--ignore") from None
    return Target(chosen, size, tuple(ignore))


def choose_modules(config: Mapping[str, Any], dense: Mapping[str, TensorInfo], target: Target) -> list[str]:
    """Modules to quantise, or to round to BF16: those whose dense weight is `<module>.weight` of shape `[out, in]`.

    Raises:
        ModelError: a weight is not BF16, or not a matrix that the format can hold.
        UnsupportedError: nothing is left to quantise.
        UsageError: a pattern of `ignore` names no module.
    """
    if target.layout == "BF16":
        wide = [name.removesuffix(".weight") for name, info in dense.items()
                if name.endswith(".weight") and len(info.shape) == 2 and info.dtype in ("F16", "F32")]  # fmt: skip
        # A few matrices, such as routers, are in F32 in BF16 models too.
        return wide if any(not is_ignored(module, ()) for module in wide) else []
    _check_ignore(target.ignore, [name.removesuffix(".weight") for name in dense])
    kind = config.get("model_type")
    roles: dict[str, str] = {}
    if kind in FAMILIES:
        roles = {w.module: w.role for w in describe(config).weights if w.is_linear}
    elif record := shipped_record(config):
        if record["transposed"]:
            raise UnsupportedError("linears stored by columns are read, but not written", where="--precision")
        # Code may read the weight of what is no linear here, such as an embedding of positions.
        roles = {w.module: w.role if w.is_linear else "other" for w in describe_tensors(config, dense, "").weights}
    chosen = []
    for name, info in dense.items():
        module = name.removesuffix(".weight")
        if not name.endswith(".weight") or len(info.shape) != 2 or is_ignored(module, target.ignore):
            continue
        role = roles.get(re.sub(r"\.experts\.\d+\.", f".experts.{EXPERT}.", module))
        if role is not None and role not in QUANTISED_ROLES:
            continue
        if info.dtype != "BF16":
            raise ModelError(
                f"the weight is {info.dtype}; only BF16 is quantised",
                where=name,
                fix=f"convert the model first (--precision BF16), or leave it out with --ignore '{module}'",
            )
        chosen.append(module)
    if not chosen:
        raise UnsupportedError("no module is left to quantise", where="--ignore", fix="ignore less")
    return chosen


def check_groups(columns: Mapping[str, int], target: Target) -> None:
    """Raises `UnsupportedError` naming the first module whose columns are no multiple of the target's group."""
    misfits = [(module, count) for module, count in columns.items() if target.group and count % target.group]
    if misfits:
        module, count = misfits[0]
        raise UnsupportedError(
            f"{count} columns are not a multiple of the group of {target.group}"
            + (f" (nor those of {len(misfits) - 1} more modules)" if len(misfits) > 1 else ""),
            where=module,
            fix=f"leave it in BF16: --ignore 're:.*{re.escape(module.rpartition('.')[2])}$'"
            + (", or choose another --group-size" if target.layout in FREE_GROUP else ""),
        )


def is_ignored(module: str, ignore: Sequence[str]) -> bool:
    """Matches by name, by the last part of the name, or by `re:` and an expression that matches from the start."""
    return any(_matches(pattern, module) for pattern in (*DEFAULT_IGNORE, *ignore))


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return module == pattern or module.endswith(f".{pattern}")


def _check_ignore(ignore: Sequence[str], modules: Sequence[str]) -> None:
    """A misspelt name would leave its module to be quantised, which shows only in the model's answers."""
    for pattern in ignore:
        # A model with tied embeddings has no head of its own to name.
        if not any(_matches(pattern, module) for module in (*modules, "lm_head")):
            parts = sorted({module.rpartition(".")[2] for module in modules})
            raise UsageError(
                f"`{pattern}` is no module of this model", where="--ignore", fix=f"name some of: {', '.join(parts)}"
            )


def quantization_block(target: Target, left_alone: Sequence[str]) -> dict[str, Any] | None:
    """The `quantization_config` of the written model; None for BF16.

    Args:
        left_alone: matrices that were not quantised. Readers assume that every unlisted linear is quantised.
    """
    listed = sorted({"lm_head", *left_alone})
    if target.layout == "BF16":
        return None
    if target.layout == "FP8Block":
        return {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": listed,
        }  # fmt: skip
    if target.layout == "NVFP4ModelOpt":
        return {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16, "ignore": listed}
    weights: dict[str, Any] = {
        "INT4": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"},
        "INT4Asymmetric": {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group"},
        "FP8": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
        "FP8BlockCT": {
            "num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [128, 128],
        },
        "NVFP4": {
            "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group",
            "scale_dtype": "torch.float8_e4m3fn",
        },
        "MXFP4": {
            "num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "scale_dtype": "torch.uint8",
        },
    }[target.layout]  # fmt: skip
    packing = {
        "INT4": "pack-quantized", "INT4Asymmetric": "pack-quantized", "FP8": "float-quantized",
        "FP8BlockCT": "float-quantized", "NVFP4": "nvfp4-pack-quantized", "MXFP4": "mxfp4-pack-quantized",
    }[target.layout]  # fmt: skip
    sized = {"group_size": target.group} if target.group else {}
    group = {
        "targets": ["Linear"], "weights": {**weights, **sized, "dynamic": False}, "input_activations": None,
        "output_activations": None, "format": packing,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": packing, "quantization_status": "compressed",
        "kv_cache_scheme": None, "ignore": listed, "config_groups": {"group_0": group},
    }  # fmt: skip


def build_config(config: Mapping[str, Any], block: Mapping[str, Any] | None) -> dict[str, Any]:
    """config.json of the written model: the source's, with its quantisation replaced."""
    inner = config.get("text_config")
    written = {key: value for key, value in config.items() if key not in ("quantization_config", "expert_dtype")}
    if isinstance(inner, Mapping) and "quantization_config" in inner:
        written["text_config"] = {key: value for key, value in inner.items() if key != "quantization_config"}
    return {**written, "quantization_config": dict(block)} if block else written
