"""Families without a row: names by transformers' own table for loading checkpoints, experts by its own modules.

Belongs here: what follows from transformers for any family. Does not belong here: rows of the odd ones, reading.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key

from orbit_runtime.errors import ModelError
from orbit_runtime.model_info.quantization import QuantFormat
from orbit_runtime.model_info.weights import ENDINGS
from orbit_runtime.policy.experts import Activation
from orbit_runtime.policy.families.family import DENSE, ExpertForm, Family, Projection
from orbit_runtime.policy.reader import CheckpointReader
from orbit_runtime.quant.experts import ExpertStack

LANGUAGE_MODEL = r"language_model\."
"""Part of the names of all that is not the vision tower, beside the output layer."""


def published_family(model: nn.Module, tensors: Iterable[str], uncalled: Sequence[str]) -> Family:
    """
    Args:
        model: transformers' modules.
        tensors: names in the checkpoint.
        uncalled: last names of linears that the model's code does not call.
    """
    has_tower = hasattr(getattr(model, "model", None), "language_model")
    names = _Names(model, tensors, "" if has_tower else "language_model.")
    vision = (rf"(?!.*{LANGUAGE_MODEL}|lm_head\.)",) if has_tower else ()
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    fp32 = [name for end in ("", "_strict") for name in getattr(model, f"_keep_in_fp32_modules{end}", None) or ()]
    kept = (*(f".{name}" for name in uncalled), *(name for name in fp32 if "." in name))
    return replace(
        DENSE,
        checkpoint_name=names.of,
        expert_sources=names.experts,
        left_out=(*(f".*(?:{pattern})" for pattern in ignored), *vision),
        no_targets=kept,
        kept_linears=kept,
        kept_fp32=tuple(fp32),
    )


class _Names:
    """The checkpoint's names, by the names of transformers' modules."""

    def __init__(self, model: Any, tensors: Iterable[str], prefix: str) -> None:
        """Args: prefix: left out where names begin with it: that of a text part saved by itself."""
        transforms = get_model_conversion_mapping(model)
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        renamings = [each for each in transforms if not isinstance(each, WeightConverter)]
        order = [pattern for each in converters for pattern in each.source_patterns]
        states = model.state_dict()
        self._of: dict[str, str] = {}
        merged: dict[str, dict[str, dict[str, None]]] = {}
        for tensor in tensors:
            ending = next((each for each in ENDINGS if tensor.endswith(each)), None)
            stem = tensor.removesuffix(ending or "")
            weight = ".weight" if ending else ""
            key, pattern = rename_source_key(
                stem.removeprefix(prefix) + weight, renamings, converters, model.base_model_prefix, states
            )
            if pattern is None:
                self._of.setdefault(key, stem + weight)
                self._of.setdefault(key.removesuffix(".weight"), stem)
            else:
                merged.setdefault(key, {}).setdefault(pattern, {})[stem] = None
        self._merged = {
            key: [sorted(by_pattern[pattern], key=_natural) for pattern in order if pattern in by_pattern]
            for key, by_pattern in merged.items()
        }
        """Modules of all experts for each projection, in the order in which transformers joins them."""

    def of(self, name: str) -> str:
        place = _ONE_EXPERT.fullmatch(name)
        experts = place and self.experts(place.group(1), place.group(3))
        if place and experts and int(place.group(2)) < len(experts):
            return experts[int(place.group(2))] + (place.group(4) or "")
        return self._of.get(name, name)

    def experts(self, name: str, leaf: str) -> Sequence[str] | None:
        if leaf == "down_proj":
            found = self._merged.get(f"{name}.down_proj")
            return found[0] if found else None
        found = self._merged.get(f"{name}.gate_up_proj", self._merged.get(f"{name}.up_proj"))
        return (found[0] if leaf == "gate_proj" else found[-1]) if found else None


_ONE_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)(\.weight)?")


def _natural(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def form_of(module: Any, checkpoint_name: Callable[[str], str]) -> ExpertForm | None:
    """The form of transformers' `…Experts`; None if it has biases or another layout than one matrix an expert."""
    if not hasattr(module, "has_gate") or module.has_bias or module.is_transposed or not module.is_concatenated:
        return None
    hidden, inner = module.down_proj.shape[1:]
    names = ("gate_proj", "up_proj") if module.has_gate else ("up_proj",)
    projections = [Projection(name, lambda _: inner, lambda _: hidden) for name in names]
    down = Projection("down_proj", lambda _: hidden, lambda _: inner)

    def read_stacked(reader: CheckpointReader, quant: QuantFormat, name: str) -> tuple[ExpertStack, None]:
        """One tensor for all experts of a layer, as some families are published."""
        parent, _, leaf = name.rpartition(".")
        key = f"{parent}.gate_up_proj" if module.has_gate and leaf != "down_proj" else name
        stored = reader.read(checkpoint_name(key))
        if stored.dtype != torch.bfloat16 or stored.ndim != 3:
            raise ModelError(f"expected bfloat16 experts, found {stored.dtype} {list(stored.shape)}", where=key)
        if key != name:
            stored = stored.chunk(2, 1)[leaf == "up_proj"].contiguous()
        return ExpertStack("BF16", {"weight": stored}), None

    return ExpertForm((*projections, down), _activation_of, read_stacked)


def _activation_of(module: Any) -> Activation:
    def activation(first_SI: Tensor, up_SI: Tensor | None) -> Tensor:
        if up_SI is None:
            return module.act_fn(first_SI)  # type: ignore[no-any-return]
        return module._apply_gate(torch.cat((first_SI, up_SI), -1))  # type: ignore[no-any-return]

    return activation
