"""`orbit inspect`: what a checkpoint contains and what Orbit would do with it, from its headers alone.

Belongs here: grouping modules, naming formats, the verdict. Does not belong here: values of tensors, memory
(`planner`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from orbit_runtime.errors import ModelError, UnsupportedError
from orbit_runtime.model_info.checkpoint import Headers, PlainDtypeError, headers_facts
from orbit_runtime.model_info.families import FAMILIES
from orbit_runtime.model_info.layouts import StoredLinear, check_head, read_linears
from orbit_runtime.model_info.quantization import PRECISIONS, QuantFormat, parse_quantization
from orbit_runtime.model_info.weights import EXPERT, Architecture, ModelFacts, Weight
from orbit_runtime.planner.support.combinations import Combination, find_support

PLACES = (("Torch", "Torch", 1), ("Torch", "SGLang", 1), ("Megatron", "SGLang", 8))
"""Ways to run: trainer, engine and number of GPUs."""
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Projections that engines read as one matrix."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class ModuleGroup:
    """Modules of one name, regardless of layer and expert numbers, that are stored alike."""

    modules: str
    """`model.layers.*.mlp.up_proj`"""
    format: str
    layout: str
    group_size: int | None
    shape: tuple[int, ...]
    count: int
    num_bytes: int
    parameters: int


@dataclass(frozen=True, slots=True)
class SupportVerdict:
    """Whether a way to run supports this model."""

    adapter: str
    trainer: str
    engine: str
    state: str
    reasons: tuple[str, ...] = ()
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that can be learned from the headers."""

    place: str
    family: str
    precision: str
    refusal: str | None
    """Why Orbit cannot read the weights; None if it can."""
    groups: tuple[ModuleGroup, ...]
    files: int
    tensors: int
    num_bytes: int
    parameters: int
    tied_head: bool
    head: str
    """Format of the output head."""
    targets: tuple[str, ...]
    """Default of `adapter.targets` for this family."""
    special: tuple[str, ...]
    verdicts: tuple[SupportVerdict, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"kind": "checkpoint", **asdict(self)}


def inspect_headers(headers: Headers) -> Inspection:
    """Inspects a checkpoint. Raises `ModelError` if it is damaged, as nothing true could be reported then."""
    config_file = f"{headers.place}/config.json"
    linears: Mapping[str, StoredLinear] = {}
    quant, refusal = QuantFormat("BF16"), None
    try:
        quant = parse_quantization(headers.config, where=config_file, tensors=headers.infos())
    except ModelError as error:
        refusal = f"{error.message} ({error.where})"
    else:
        linears = read_linears(headers.tensors, quant, config=config_file)
        check_head(headers.config, linears, config_file)
    facts, unknown = _facts(headers, refusal)
    if facts and refusal is None and not facts.architecture.passes:
        _check_family(headers, facts.architecture, quant, linears)
    groups = _groups(headers, linears, refusal)
    # Types tie by default, and checkpoints hold a head of their own all the same.
    tied = not any("lm_head." in name and not name.endswith(".bias") for name in headers.tensors) and (
        not any(each.role == "head" for each in facts.architecture.weights)
        if facts
        else bool(headers.config.get("tie_word_embeddings"))
    )
    precision = quant.name if refusal is None else "unknown"
    return Inspection(
        place=headers.place,
        family=facts.architecture.family if facts else str(headers.config.get("model_type")),
        precision=precision,
        refusal=refusal,
        groups=groups,
        files=len({file for file, _ in headers.tensors.values()}),
        tensors=len(headers.tensors),
        num_bytes=sum(group.num_bytes for group in groups),
        parameters=sum(group.parameters for group in groups),
        tied_head=tied,
        head=next((group.format for group in groups if group.modules.endswith("lm_head")), "BF16"),
        targets=facts.architecture.default_targets if facts else (),
        special=_special(facts.architecture, tied) if facts else (),
        verdicts=_verdicts(facts.architecture, precision) if facts and refusal is None else (),
        notes=(*_notes(linears, headers, tied), *unknown),
    )


def inspect_facts(facts: ModelFacts) -> Inspection:
    """Inspects a shipped card, which describes a published model before anything is downloaded."""
    groups: dict[tuple[str, str, tuple[int, ...]], ModuleGroup] = {}
    for stored in facts.weights:
        weight = stored.weight
        name = _NUMBER.sub("*", weight.module).replace(EXPERT, "*")
        key = (name, stored.format, weight.shape)
        old = groups.get(key, ModuleGroup(name, stored.format, "", None, weight.shape, 0, 0, 0))
        groups[key] = ModuleGroup(
            name, stored.format, "", None, weight.shape, old.count + weight.count, old.num_bytes + stored.num_bytes,
            old.parameters + weight.num_parameters,
        )  # fmt: skip
    architecture = facts.architecture
    tied = not any(weight.role == "head" for weight in architecture.weights)
    return Inspection(
        place=facts.source,
        family=architecture.family,
        precision=facts.precision,
        refusal=None,
        groups=tuple(groups.values()),
        files=0,
        tensors=0,
        num_bytes=facts.checkpoint_bytes,
        parameters=sum(group.parameters for group in groups.values()),
        tied_head=tied,
        head=next((s.format for s in facts.weights if s.weight.role == "head"), "BF16"),
        targets=architecture.default_targets,
        special=_special(architecture, tied),
        verdicts=_verdicts(architecture, facts.precision),
        notes=("from a shipped card: the files themselves were not read",),
    )


def _facts(headers: Headers, refusal: str | None) -> tuple[ModelFacts | None, tuple[str, ...]]:
    """A type that cannot be used, or that nothing is known of here, is not damage."""
    if refusal is not None and headers.config.get("model_type") not in FAMILIES:
        return None, ()
    try:
        return headers_facts(headers, headers.place), ()
    except (PlainDtypeError, UnsupportedError) as error:
        return None, (f"{error.message}; {error.fix}",)


def _check_family(
    headers: Headers, architecture: Architecture, quant: QuantFormat, linears: Mapping[str, StoredLinear]
) -> None:
    """Checks that a module's tensors agree with what its family says."""
    by_module = {weight.module: weight for weight in architecture.weights if weight.is_linear}
    for name, (file, info) in headers.tensors.items():
        module = name.removesuffix(".weight")
        weight = by_module.get(_general(module))
        if weight is None or not name.endswith(".weight") or module in linears:
            continue
        if not quant.by_tensor and quant.is_quantized(module):
            raise ModelError(
                f"{module} should be {quant.name}, but the tensor is {info.dtype}",
                where=f"{file}: {name}",
                fix="copy config.json and the weights from the same place",
            )
        _check_shape(weight, info.shape, f"{file}: {name}")
    for linear in linears.values():
        known = by_module.get(_general(linear.module))
        if known is not None:
            first = linear.tensors[0]
            _check_shape(known, (linear.rows, linear.columns), f"{headers.tensors[first][0]}: {first}")


def _check_shape(weight: Weight, shape: tuple[int, ...], where: str) -> None:
    if tuple(shape[-2:]) != weight.shape[-2:]:
        raise ModelError(
            f"the weight is {list(shape)}, config.json says {list(weight.shape)}",
            where=where,
            fix="config.json and the weights belong to different models: copy or download the model again",
        )


def _general(module: str) -> str:
    return re.sub(r"\.experts\.\d+\.", f".experts.{EXPERT}.", module)


def _groups(headers: Headers, linears: Mapping[str, StoredLinear], refusal: str | None) -> tuple[ModuleGroup, ...]:
    part_of = {tensor: linear for linear in linears.values() for tensor in linear.tensors}
    groups: dict[tuple[Any, ...], ModuleGroup] = {}
    for name, (_, info) in sorted(headers.tensors.items()):
        linear = part_of.get(name)
        if linear is not None:
            module, layout, size = linear.module, linear.layout, linear.group
            shape, is_first = (linear.rows, linear.columns), name == linear.tensors[0]
            form, number = PRECISIONS[layout], linear.experts
        else:
            module = name.removesuffix(".weight")
            layout, size, shape, is_first, number = info.dtype, None, info.shape, True, 1
            form = info.dtype if refusal is None or info.dtype in ("BF16", "F32", "F16") else f"{info.dtype}, unknown"
        pattern = _NUMBER.sub("*", module)
        key = (pattern, layout, shape, size)
        old = groups.get(key, ModuleGroup(pattern, form, layout, size, shape, 0, 0, 0))
        count, parameters = (number, number * math.prod(shape)) if is_first else (0, 0)
        groups[key] = ModuleGroup(
            pattern, form, layout, size, shape, old.count + count, old.num_bytes + info.num_bytes,
            old.parameters + parameters,
        )  # fmt: skip
    return tuple(groups.values())


def _special(architecture: Architecture, tied: bool) -> tuple[str, ...]:
    """Layers that are treated differently from the others, and how."""
    roles = {weight.role for weight in architecture.weights}
    lines = []
    if "router" in roles:
        lines.append("router: in fp32, never adapted; it sees the unrotated input")
    if "routed_expert" in roles:
        count, active = architecture.num_experts, architecture.experts_per_token
        lines.append(f"{count} routed experts a layer, {active} for a token: adapter.experts says how they are adapted")
    if "shared_expert" in roles:
        lines.append("shared experts: adapted like dense layers")
    if any(weight.target == "kv_b_proj" for weight in architecture.weights):
        lines.append("kv_b_proj: not adapted by default, engines absorb it into attention")
    if "mtp" in roles:
        lines.append("multi-token prediction layers: not loaded")
    if "vision" in roles:
        lines.append("vision tower: not loaded")
    if any(weight.role == "mixer" for weight in architecture.weights):
        lines.append("layers with a state of their own: adapted like attention")
    if architecture.passes:
        lines.append(f"passes: {architecture.passes}")
    lines.append("output head: the embedding itself (tied)" if tied else "output head: never adapted by default")
    return tuple(lines)


def _verdicts(shape: Architecture, precision: str) -> tuple[SupportVerdict, ...]:
    verdicts = []
    for trainer, engine, gpus in PLACES:
        for adapter in ("LoRA", "OFT"):
            experts = ("SharedOuter" if adapter == "LoRA" else "Shared") if shape.num_experts else "None"
            found = find_support(Combination(precision, shape.family, adapter, experts, engine, trainer, gpus))
            verdicts.append(SupportVerdict(adapter, trainer, engine, found.state, found.reasons, found.fix))
    return tuple(verdicts)


def _notes(linears: Mapping[str, StoredLinear], headers: Headers, tied: bool) -> list[str]:
    """Notes on what is valid but worth knowing."""
    notes = []
    if "lm_head" in linears:
        notes.append("the output head is quantised: log-probs carry its error; engines differ on whether they read it")
    if headers.config.get("tie_word_embeddings") and not tied:
        notes.append("config.json ties head and embedding, but the file holds a head of its own: the file's is used")
    mixed = []
    for module in linears:
        parent, _, leaf = module.rpartition(".")
        for fused in FUSED:
            if leaf != fused[0] and leaf in fused and f"{parent}.{fused[0]}" in linears:
                first = linears[f"{parent}.{fused[0]}"]
                if (first.layout, first.group) != (linears[module].layout, linears[module].group):
                    mixed.append(f"{parent}.{fused[0]} is {first.layout}, {leaf} is {linears[module].layout}")
    if mixed:
        notes.append(
            f"mixed formats in one layer: {mixed[0]}; Orbit reads each as it is, engines fuse these and may not"
        )
    return notes
