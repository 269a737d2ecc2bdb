"""Reads the facts of a checkpoint from its own files: config.json and the headers of its safetensors files.

Belongs here: a local folder. Does not belong here: a store or a hub (`remote_checkpoint`), the values of tensors,
shipped cards.

The headers say what is stored; the family only provides names and roles. Tensors that a family does not know are
counted by their headers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orbit_runtime.errors import ModelError
from orbit_runtime.model_info.families import FAMILIES, describe
from orbit_runtime.model_info.headers import TensorInfo, read_folder
from orbit_runtime.model_info.module_tree import MISMATCH, describe_tensors, split_targets
from orbit_runtime.model_info.quantization import from_legacy_modelopt, quantisation_method
from orbit_runtime.model_info.settings import check_model_folder, load_settings
from orbit_runtime.model_info.weights import ENDINGS, EXPERT, STORED, ModelFacts, StoredWeight, Weight

LEGACY_QUANTISATION = "hf_quant_config.json"
"""File in which older ModelOpt versions keep what newer ones keep in config.json."""
FIXED_BLOCKS = {name.partition("/")[0]: STORED[name].block for name in ("NVFP4/16", "MXFP4/32", "FP8/128")}
"""Precision → rows and columns under one scale, if the format fixes them; FP8 may be stored without blocks."""
_EXPERT_NUMBER = re.compile(r"\.experts\.\d+\.")


@dataclass
class _Found:
    """What the headers contain for one weight."""

    num_bytes: int = 0
    endings: dict[str, str] | None = None
    """Ending → dtype."""
    scales: tuple[int, ...] = ()
    """Shape of the scales, if the format does not fix the number of columns per scale."""


@dataclass(frozen=True, slots=True)
class Headers:
    """The headers of a checkpoint's files."""

    place: str
    """Folder or URI, for messages."""
    config: Mapping[str, Any]
    """config.json; the quantisation from an older ModelOpt file is inserted."""
    tensors: Mapping[str, tuple[Path | str, TensorInfo]]
    """Tensor → (file, header entry)."""

    def infos(self) -> dict[str, TensorInfo]:
        return {name: info for name, (_, info) in self.tensors.items()}


def folder_headers(folder: Path) -> Headers:
    """Headers of a local model folder. Raises `ModelError` if it is incomplete."""
    tensors = read_folder(folder)
    return Headers(str(folder), read_config(folder), tensors)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder; the quantisation from an older ModelOpt file is inserted.

    Raises: ModelError: there is none, it is damaged, or a conversion into the folder was not finished.
    """
    check_model_folder(folder, "name a Hugging Face model folder in spec.model.uri")
    config, legacy = load_settings(folder / "config.json"), folder / LEGACY_QUANTISATION
    if legacy.is_file() and not config.get("quantization_config"):
        config["quantization_config"] = from_legacy_modelopt(load_settings(legacy))
    return config


def folder_facts(folder: Path) -> ModelFacts:
    """Facts of a model folder. Raises `ModelError` if it is incomplete, or its family is unknown."""
    return headers_facts(folder_headers(folder), folder.name)


def headers_facts(headers: Headers, name: str) -> ModelFacts:
    return _facts(headers.config, headers.infos(), name=name, source=f"headers in {headers.place}")


def _facts(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], *, name: str, source: str) -> ModelFacts:
    file = f"{name}/config.json"
    is_row = config.get("model_type") in FAMILIES
    architecture = describe(config, where=file) if is_row else describe_tensors(config, tensors, file)
    expected = {weight.module: weight for weight in architecture.weights}
    found: dict[str, _Found] = {}
    unknown: dict[str, int] = {}
    for tensor, info in tensors.items():
        module, ending = _module_of(tensor, expected)
        if module is None:
            unknown[tensor] = info.num_bytes
            continue
        entry = found.setdefault(module, _Found(endings={}))
        entry.num_bytes += info.num_bytes
        assert entry.endings is not None
        entry.endings[ending] = info.dtype
        if ending in (".weight_scale", ".scales"):
            entry.scales = info.shape
    # Conversions omit the layers used only for speculative decoding, and the vision tower of a text model.
    needed = [weight for weight in architecture.weights if weight.role not in ("mtp", "vision")]
    missing = [weight.name for weight in needed if weight.module not in found]
    if missing:
        raise ModelError(
            f"the checkpoint lacks {len(missing)} weights of a {architecture.family}, such as {missing[0]}",
            where=name,
            fix=MISMATCH,
        )
    _check_dtypes(expected, found, name)
    stored = [
        part
        for module, each in found.items()
        for part in split_targets(
            StoredWeight(expected[module], each.num_bytes, _format(each), _block(expected[module], each))
        )
    ]
    stored += [
        StoredWeight(Weight(tensor, (), "other", is_split=False), size, "BF16") for tensor, size in unknown.items()
    ]
    return ModelFacts(
        name=name,
        source=source,
        precision=_precision(stored),
        architecture=replace(architecture, weights=tuple(each.weight for each in stored)),
        weights=tuple(stored),
        checkpoint_bytes=sum(info.num_bytes for info in tensors.values()),
        unknown=tuple(sorted(unknown)),
        quantised_by=quantisation_method(config),
    )


class PlainDtypeError(ModelError):
    """Matrices are neither packed nor BF16."""


def _check_dtypes(expected: Mapping[str, Weight], found: Mapping[str, _Found], name: str) -> None:
    for module, each in found.items():
        weight, dtypes = expected[module], set((each.endings or {}).values())
        is_matrix = (weight.is_linear or weight.role == "embedding") and weight.role not in ("mtp", "vision")
        if is_matrix and dtypes <= {"F16", "F32", "F64"}:
            raise PlainDtypeError(
                f"{weight.name} is {min(dtypes)}, and Orbit reads BF16 or a packed format",
                where=name,
                fix="write it anew: orbit convert FOLDER NEW --precision BF16",
            )


def _module_of(tensor: str, expected: Mapping[str, Weight]) -> tuple[str | None, str]:
    general = _EXPERT_NUMBER.sub(f".experts.{EXPERT}.", tensor)
    if general in expected:
        return general, ""
    for ending in ENDINGS:
        if general.endswith(ending) and general.removesuffix(ending) in expected:
            return general.removesuffix(ending), ending
    return None, ""


def _format(found: _Found) -> str:
    """The format according to the headers, not to a configuration."""
    endings = found.endings or {}
    kinds = set(endings.values())
    if "_blocks" in endings:
        return "MXFP4"
    if ".qweight" in endings or endings.get(".weight_packed") == "I32":
        return "INT4"
    if kinds & {"U8", "I8", "F4"}:
        # E2M1 codes: with E4M3 scales it is NVFP4, with E8M0 scales (or plain bytes) MXFP4.
        return "NVFP4" if "F8_E4M3" in kinds else "MXFP4"
    return "FP8" if "F8_E4M3" in kinds else "BF16"


def _block(weight: Weight, found: _Found) -> tuple[int, int] | None:
    """Rows and columns under one scale, which a cut must not separate."""
    endings, form = found.endings or {}, _format(found)
    if form in ("NVFP4", "MXFP4"):
        return FIXED_BLOCKS[form]
    if form == "INT4" and len(found.scales) == 2:
        # GPTQ and AWQ store their scales transposed.
        groups = found.scales[0 if ".scales" in endings else 1]
        return (1, weight.shape[-1] // groups) if groups > 1 else None
    is_blockwise = ".weight_scale_inv" in endings or ".scale" in endings or (found.scales or (0, 1))[-1] > 1
    return FIXED_BLOCKS[form] if form == "FP8" and is_blockwise and len(found.scales) != 1 else None


def _precision(stored: list[StoredWeight]) -> str:
    """The precision of the routed experts; in a dense model, of most bytes of its linears."""
    linears = [each for each in stored if each.weight.is_linear and each.weight.role not in ("head", "mtp", "vision")]
    experts = [each for each in linears if each.weight.role == "routed_expert"]
    totals: dict[str, int] = {}
    for each in experts or linears:
        totals[each.format] = totals.get(each.format, 0) + each.weight.num_parameters
    return max(totals, key=lambda name: totals[name]) if totals else "BF16"
