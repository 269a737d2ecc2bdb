"""A checkpoint's `quantization_config` → how each module is stored, or an error that names the unsupported format.

Belongs here: interpreting the configuration, per module. Does not belong here: the values of tensors, codecs (`quant`).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from orbit_runtime.errors import ModelError
from orbit_runtime.model_info.headers import TensorInfo, known_name

Precision = Literal["BF16", "INT4", "FP8", "NVFP4", "MXFP4"]
PRECISIONS: dict[str, Precision] = {
    "BF16": "BF16", "INT4": "INT4", "INT4Asymmetric": "INT4", "GPTQ": "INT4", "GPTQv2": "INT4", "AWQ": "INT4",
    "FP8": "FP8", "FP8Block": "FP8", "FP8BlockCT": "FP8", "FP8BlockV4": "FP8", "NVFP4": "NVFP4",
    "NVFP4ModelOpt": "NVFP4", "MXFP4": "MXFP4", "MXFP4V4": "MXFP4", "MXFP4GptOss": "MXFP4",
}  # fmt: skip
"""Layout on disk → the manifest's name of the precision."""
EXPERT_PROBES = ("model.layers.3.mlp.experts.0.up_proj", "model.layers.3.block_sparse_moe.experts.0.w1")
DENSE_PROBE = "model.layers.3.mlp.up_proj"
V4_EXPERTS = r"re:.*\.experts\.\d+\."


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """Storage format of a checkpoint's linear layers.

    Example: `QuantFormat("INT4", 32, ("lm_head", "re:.*self_attn.*"))`
    """

    name: Precision
    """Precision of the routed experts, if there are any: the bulk of the model."""
    group_size: int | None = None
    """Columns per scale; None if the format has no groups, or a whole row is one group."""
    ignore: tuple[str, ...] = ()
    """Modules left in BF16: exact names, class names, or `re:` and a regular expression that matches from the start."""
    targets: tuple[str, ...] = ("Linear",)
    """Modules that are quantised, in the same notation."""
    layout: str = ""
    """Tensor names and packing, a key of `PRECISIONS`; empty for the layout with the precision's name."""
    exceptions: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Layouts of other modules in a mixed checkpoint, with their targets; the first that matches wins."""
    by_tensor: bool = False
    """A module is quantised only if the file holds its scale: some methods do not list the modules left in BF16."""

    def layout_of(self, module_name: str, class_name: str = "Linear") -> str:
        """The layout of this module, `BF16` if it is not quantised."""
        if self.name == "BF16" or _matches(self.ignore, module_name, class_name):
            return "BF16"
        for layout, targets in self.exceptions:
            if _matches(targets, module_name, class_name):
                return layout
        return (self.layout or self.name) if _matches(self.targets, module_name, class_name) else "BF16"

    def is_quantized(self, module_name: str, class_name: str = "Linear") -> bool:
        """Whether the checkpoint holds packed tensors for this module."""
        return self.layout_of(module_name, class_name) != "BF16"


def parse_quantization(
    config: Mapping[str, Any], *, where: str = "config.json", tensors: Mapping[str, TensorInfo] | None = None
) -> QuantFormat:
    """`config` is the model's whole config.json. No quantisation block means BF16.

    `tensors` are the headers, if available: they decide what a config leaves open (DeepSeek-V4's experts).
    """
    block = _block_of(config)
    if not block:
        return QuantFormat("BF16")
    where = f"{where}: quantization_config"
    if not isinstance(block, Mapping):
        raise _unknown(f"is a {type(block).__name__}", where)
    try:
        found = _parse(config, block, tensors or {}, where)
        for pattern in (*found.ignore, *found.targets, *(each for _, targets in found.exceptions for each in targets)):
            re.compile(pattern.removeprefix("re:"))
    except (AttributeError, KeyError, TypeError, ValueError, re.error) as error:
        raise _unknown(f"a value or a pattern in it is broken: {error}", where) from None
    return found


def _parse(
    config: Mapping[str, Any], block: Mapping[str, Any], tensors: Mapping[str, TensorInfo], where: str
) -> QuantFormat:
    method = block.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(block, tensors, where)
    if method == "fp8":
        expert_dtype = config.get("expert_dtype") or block.get("expert_dtype")
        return _fp8(block, expert_dtype, tensors, where)
    if method == "mxfp4":
        experts = (r"re:.*\.experts\.(gate_up_proj|down_proj)$",)
        return QuantFormat("MXFP4", 32, _like_transformers(block), experts, "MXFP4GptOss")
    if method == "modelopt":
        return _modelopt(block, where)
    if method == "gptq":
        return _gptq(block, where)
    if method == "awq":
        return _awq(block, where)
    raise _unknown(f"quant_method is {method!r}", where)


def quantisation_method(config: Mapping[str, Any]) -> str:
    """`quant_method`, such as `compressed-tensors`; empty if nothing is packed."""
    block = _block_of(config)
    return str(block.get("quant_method") or "") if isinstance(block, Mapping) else ""


def _block_of(config: Mapping[str, Any]) -> Any:
    """The model's, or its language model's."""
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, Mapping) else None
    return config.get("quantization_config") or inner


def from_legacy_modelopt(file: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ModelOpt's older `hf_quant_config.json` → the equivalent block of a newer config.json."""
    found = file.get("quantization")
    inner = dict(found) if isinstance(found, Mapping) else {}
    return {"quant_method": "modelopt", "ignore": inner.pop("exclude_modules", None) or [], **inner}


def _compressed_tensors(block: Mapping[str, Any], tensors: Mapping[str, TensorInfo], where: str) -> QuantFormat:
    groups = block.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _unknown(f"compressed-tensors format {block.get('format')!r} with 0 config groups", where)
    for key in ("transform_config", "sparsity_config"):
        extra = block.get(key)
        if isinstance(extra, Mapping) and extra and extra.get("format") != "dense":
            raise _unknown(f"{key} is set", where)
    if reordered := [name for name in tensors if name.endswith(".weight_g_idx")]:
        raise _unknown(f"{reordered[0]} is stored: its columns are in another order", where)
    rules = []
    for name, group in groups.items():
        if not isinstance(group, Mapping) or not isinstance(group.get("weights") or {}, Mapping):
            raise _unknown(f"config group {name} does not describe weights", where)
        packing = group.get("format") or block.get("format")
        layout, size = _compressed_group(packing, group, where)
        rules.append((layout, size, tuple(group.get("targets") or ("Linear",))))
    # A name or an expression is more specific than a class.
    rules.sort(key=lambda rule: any(target[:1].isupper() for target in rule[2]))
    main = _experts_rule(rules)
    ordered = tuple((layout, targets) for layout, _, targets in rules) if len(rules) > 1 else ()
    return QuantFormat(
        PRECISIONS[main[0]],
        main[1],
        tuple(block.get("ignore") or ()),
        main[2],
        "" if main[0] == PRECISIONS[main[0]] else main[0],
        ordered,
    )


def _experts_rule(rules: list[tuple[str, int | None, tuple[str, ...]]]) -> tuple[str, int | None, tuple[str, ...]]:
    """The rule for the routed experts; the rule for dense layers if none mentions experts."""
    for probe in (*EXPERT_PROBES, DENSE_PROBE):
        for rule in rules:
            if _matches(rule[2], probe, "Linear"):
                return rule
    return rules[0]


def _compressed_group(packing: Any, group: Mapping[str, Any], where: str) -> tuple[str, int | None]:
    """Layout and group size of one config group."""
    weights = group.get("weights") or {}
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if packing == "pack-quantized":
        return _int4(weights, group, where)
    if packing in ("float-quantized", "naive-quantized"):
        _expect(weights, {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}, where)
        if strategy in ("channel", "tensor"):
            return "FP8", None
        if strategy == "block" and weights.get("block_structure") == [128, 128]:
            return "FP8BlockCT", 128
        raise _unknown(f"weights.strategy is {strategy!r}, blocks {weights.get('block_structure')!r}", where)
    floats = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
    if packing == "nvfp4-pack-quantized":
        _expect(weights, floats | {"strategy": "tensor_group", "group_size": 16}, where)
        return "NVFP4", 16
    if packing == "mxfp4-pack-quantized":
        _expect(weights, floats | {"strategy": "group", "group_size": 32}, where)
        return "MXFP4", 32
    raise _unknown(f"compressed-tensors format {packing!r} (group_size {size!r})", where)


def _int4(weights: Mapping[str, Any], group: Mapping[str, Any], where: str) -> tuple[str, int | None]:
    _expect(weights, {"num_bits": 4, "type": "int", "dynamic": False}, where)
    # With the other two orders columns were rounded in another order, and are stored in their own.
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise _unknown(f"weights.actorder is {weights['actorder']!r}", where)
    if weights.get("num_bits") is None:
        raise _unknown("weights.num_bits is not given", where)
    if group.get("input_activations"):
        raise _unknown("it quantises activations too", where)
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool):
        raise _unknown(f"weights.symmetric is {symmetric!r}", where)
    layout = "INT4" if symmetric else "INT4Asymmetric"
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy == "channel":
        return layout, None
    if strategy != "group" or not isinstance(size, int) or size <= 0 or size % 8:
        raise _unknown(f"weights.strategy is {strategy!r} with group_size {size!r}", where)
    return layout, size


def _fp8(block: Mapping[str, Any], expert_dtype: Any, tensors: Mapping[str, TensorInfo], where: str) -> QuantFormat:
    """Hugging Face's `fp8`: DeepSeek-V3 and Qwen3-FP8 by their tensor names, DeepSeek-V4 by its own."""
    if block.get("weight_block_size") != [128, 128]:
        raise _unknown(f"fp8 with weight_block_size {block.get('weight_block_size')!r}", where)
    if block.get("fmt", "e4m3") != "e4m3":
        raise _unknown(f"fmt is {block['fmt']!r}", where)
    if expert_dtype not in (None, "fp8", "fp4"):
        raise _unknown(f"expert_dtype is {expert_dtype!r}", where)
    ignore = _like_transformers(block)
    own_names = any(name.endswith(".scale") and f"{name.removesuffix('.scale')}.weight" in tensors for name in tensors)
    own_names = own_names or (expert_dtype is not None and not tensors)
    layout = "FP8BlockV4" if own_names else "FP8Block"
    experts = re.compile(V4_EXPERTS[3:])
    stored = {info.dtype for name, info in tensors.items() if name.endswith(".weight") and experts.match(name)}
    # The tensors take precedence over the config: conversions keep `expert_dtype` and store FP8 (SGLang does the same).
    packed = bool(stored & {"I8", "U8", "F4"}) if stored else expert_dtype == "fp4"
    if packed:
        return QuantFormat("MXFP4", 32, ignore, ("Linear",), layout, (("MXFP4V4", (V4_EXPERTS,)),), by_tensor=True)
    return QuantFormat("FP8", 128, ignore, layout=layout, by_tensor=True)


def _modelopt(block: Mapping[str, Any], where: str) -> QuantFormat:
    algorithms = {"FP8": "FP8", "NVFP4": "NVFP4ModelOpt", "W4A16_NVFP4": "NVFP4ModelOpt"}
    ignore = tuple(f"re:{fnmatch.translate(known_name(pattern))}" for pattern in block.get("ignore") or ())
    algorithm = block.get("quant_algo")
    if algorithm == "MIXED_PRECISION":
        layers = block.get("quantized_layers")
        if not isinstance(layers, Mapping) or not layers:
            raise _unknown("quant_algo is 'MIXED_PRECISION' without quantized_layers", where)
        names: dict[str, list[str]] = {}
        for name, layer in layers.items():
            algorithm = layer.get("quant_algo") if isinstance(layer, Mapping) else layer
            if algorithm not in algorithms or layer.get("group_size", 16) != 16:
                raise _unknown(f"quant_algo of {name} is {algorithm!r}", where)
            names.setdefault(algorithms[algorithm], []).append(known_name(name))
        # The layout of the experts, if there are any; otherwise that of most modules.
        main = max(names, key=lambda layout: (any(".experts." in name for name in names[layout]), len(names[layout])))
        others = tuple((layout, tuple(listed)) for layout, listed in names.items() if layout != main)
        return QuantFormat(PRECISIONS[main], None, ignore, tuple(names[main]), main, others)
    if algorithm not in algorithms:
        raise _unknown(f"quant_algo is {algorithm!r}", where)
    layout = algorithms[algorithm]
    size = block.get("group_size") or 16
    if layout == "NVFP4ModelOpt" and size != 16:
        raise _unknown(f"group_size is {size!r}", where)
    return QuantFormat(PRECISIONS[layout], 16 if layout == "NVFP4ModelOpt" else None, ignore, layout=layout)


def _gptq(block: Mapping[str, Any], where: str) -> QuantFormat:
    version = block.get("checkpoint_format") or "gptq"
    layouts = {"gptq": "GPTQ", "gptq_v2": "GPTQv2"}
    if version not in layouts:
        raise _unknown(f"checkpoint_format is {version!r}", where)
    for key, wanted in {"bits": 4, "desc_act": False}.items():
        if block.get(key, wanted) != wanted:
            raise _unknown(f"{key} is {block[key]!r}", where)
    if block.get("dynamic"):
        raise _unknown("dynamic gives modules settings of their own", where)
    size = block.get("group_size", 128)
    return QuantFormat("INT4", None if size == -1 else size, layout=layouts[version], by_tensor=True)


def _awq(block: Mapping[str, Any], where: str) -> QuantFormat:
    for key, wanted in {"bits": 4, "version": "gemm", "zero_point": True}.items():
        found = block.get(key, wanted)
        if (found.lower() if isinstance(found, str) else found) != wanted:
            raise _unknown(f"{key} is {found!r}", where)
    size = block.get("group_size", 128)
    ignore = tuple(f"re:.*{re.escape(name)}" for name in block.get("modules_to_not_convert") or ())
    return QuantFormat("INT4", size, ignore, layout="AWQ", by_tensor=True)


def _like_transformers(block: Mapping[str, Any]) -> tuple[str, ...]:
    """`modules_to_not_convert`: a prefix or suffix of a name, as interpreted by transformers'
    `should_convert_module`."""
    names = [re.escape(name) for name in block.get("modules_to_not_convert") or ()]
    return tuple(f"re:({name}|.*{name}$)" for name in names)


def _expect(weights: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    for key, value in wanted.items():
        if weights.get(key, value) not in (value, None if value is False else value):
            raise _unknown(f"weights.{key} is {weights[key]!r}", where)


def _matches(patterns: tuple[str, ...], module_name: str, class_name: str) -> bool:
    return any(
        re.match(pattern[3:], module_name) if pattern.startswith("re:") else pattern in (module_name, class_name)
        for pattern in patterns
    )


def _unknown(what: str, where: str) -> ModelError:
    return ModelError(
        f"Orbit does not read this quantisation: {what}",
        where=where,
        fix="use BF16, or compressed-tensors INT4, FP8, NVFP4 or MXFP4, ModelOpt FP8 or NVFP4, fp8, GPTQ or AWQ",
    )
