"""A checkpoint's `quantization_config` → the one format of ours that it is, or an error that says what it is instead.

Belongs here: understanding the configuration. Does not belong here: tensors, codecs (`quant`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from orbit_runtime.errors import ModelError


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """How the linear layers of a checkpoint are stored.

    Example: `QuantFormat("INT4", 32, ("lm_head", "re:.*self_attn.*"))`
    """

    name: Literal["BF16", "INT4"]
    group_size: int | None = None
    """Columns per scale; None where the format has no groups, or where a whole row is one group."""
    ignore: tuple[str, ...] = ()
    """Modules left in BF16: exact names, class names, or `re:` and a regular expression that matches from the start."""
    targets: tuple[str, ...] = ("Linear",)
    """Modules that are quantised, written likewise."""

    def is_quantized(self, module_name: str, class_name: str = "Linear") -> bool:
        """Whether the checkpoint holds packed tensors for this module."""
        if self.name == "BF16" or _matches(self.ignore, module_name, class_name):
            return False
        return _matches(self.targets, module_name, class_name)


def parse_quantization(config: Mapping[str, Any], *, where: str = "config.json") -> QuantFormat:
    """`config` is the model's whole config.json. No quantisation block means BF16."""
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, Mapping) else None
    block = config.get("quantization_config") or inner
    if not block:
        return QuantFormat("BF16")
    where = f"{where}: quantization_config"
    if not isinstance(block, Mapping):
        raise _unknown(f"is a {type(block).__name__}", where)
    method, packing = block.get("quant_method"), block.get("format")
    if method != "compressed-tensors":
        raise _unknown(f"quant_method is {method!r}", where)
    groups = block.get("config_groups")
    if packing != "pack-quantized" or not isinstance(groups, Mapping) or len(groups) != 1:
        count = len(groups) if isinstance(groups, Mapping) else 0
        raise _unknown(f"compressed-tensors format {packing!r} with {count} config groups", where)
    (group,) = groups.values()
    weights = group.get("weights") or {}
    return QuantFormat(
        "INT4",
        _group_size(weights, group, where),
        tuple(block.get("ignore") or ()),
        tuple(group.get("targets") or ("Linear",)),
    )


def _group_size(weights: Mapping[str, Any], group: Mapping[str, Any], where: str) -> int | None:
    expected = {"num_bits": 4, "type": "int", "symmetric": True, "actorder": None, "dynamic": False}
    for key, value in expected.items():
        if weights.get(key, value) != value:
            raise _unknown(f"weights.{key} is {weights[key]!r}", where)
    if weights.get("num_bits") is None:
        raise _unknown("weights.num_bits is not given", where)
    if group.get("input_activations"):
        raise _unknown("it quantises activations too", where)
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy == "channel":
        return None
    if strategy != "group" or not isinstance(size, int) or size <= 0 or size % 8:
        raise _unknown(f"weights.strategy is {strategy!r} with group_size {size!r}", where)
    return size


def _matches(patterns: tuple[str, ...], module_name: str, class_name: str) -> bool:
    return any(
        re.match(pattern[3:], module_name) if pattern.startswith("re:") else pattern in (module_name, class_name)
        for pattern in patterns
    )


def _unknown(what: str, where: str) -> ModelError:
    return ModelError(
        f"Orbit does not read this quantisation: {what}",
        where=where,
        fix="use a BF16 checkpoint, or compressed-tensors pack-quantized with symmetric 4-bit weights",
    )
