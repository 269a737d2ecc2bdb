"""Facts that inference servers need about a model that no process of ours loads, from checkpoint headers alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from orbit_runtime.adapters.config import AdapterConfig, InjectReport
from orbit_runtime.errors import ManifestError
from orbit_runtime.model_info.checkpoint import Headers, folder_headers, headers_facts
from orbit_runtime.model_info.layouts import packed_module
from orbit_runtime.model_info.quantization import parse_quantization
from orbit_runtime.model_info.weights import EXPERT, Architecture, Weight
from orbit_runtime.planner.adapter_size import LEFT_OUT
from orbit_runtime.planner.support.served import module_name
from orbit_runtime.policy.facts import PolicyFacts, RoutedFacts

EXPERTS = f".{EXPERT}."


def facts_of_checkpoint(folder: Path, adapter: AdapterConfig, compute_dtype: str) -> PolicyFacts:
    """
    Args:
        adapter: if it has no targets, it gets the family's default ones.

    Raises:
        ModelError: the folder is incomplete, or its model family is unknown.
        ManifestError: (64) a target names no linear layer.
    """
    return facts_of_headers(folder_headers(folder), adapter, compute_dtype)


def facts_of_headers(headers: Headers, adapter: AdapterConfig, compute_dtype: str) -> PolicyFacts:
    """The same, from headers that are read already."""
    model = headers_facts(headers, headers.place)
    architecture = model.architecture
    adapter = replace(adapter, targets=adapter.targets or architecture.default_targets)
    linears = [weight for weight in architecture.weights if weight.is_linear and weight.role not in LEFT_OUT]
    for index, target in enumerate(adapter.targets):
        if not any(_is_named(weight, target) for weight in linears):
            raise ManifestError(
                f"{target!r} matches no linear layer of the model", where=f"spec.adapter.targets[{index}]"
            )
    adapted = [weight for weight in linears if any(_is_named(weight, target) for target in adapter.targets)]
    if adapter.expert_layout == "None":
        adapted = [weight for weight in adapted if weight.role != "routed_expert"]
    layers = tuple(dict.fromkeys(module_name(weight) for weight in adapted))
    infos = headers.infos()
    quant = parse_quantization(headers.config, where=f"{headers.place}/config.json", tensors=infos)
    routed = _routed_layers(architecture)
    of_experts = {weight.module.partition(EXPERTS)[0] for weight in adapted if weight.role == "routed_expert"}
    packed = (packed_module(name, info)[0] for name, info in infos.items() if ".experts." in name)
    formats = {quant.layout_of(name) for name in packed if name and any(name.startswith(each) for each in of_experts)}
    return PolicyFacts(
        vocabulary=architecture.vocab_size,
        precision=quant.name,
        compute_dtype=compute_dtype,
        adapter=adapter,
        layers=layers,
        modules=frozenset(module_name(weight) for weight in linears),
        report=InjectReport((), 0),
        expert_formats=tuple(sorted(formats or ({"BF16"} if of_experts else set()))),
        group_size=None,
        routed=RoutedFacts(architecture.num_layers, routed, architecture.experts_per_token) if routed else None,
    )


def _routed_layers(architecture: Architecture) -> tuple[int, ...]:
    layers = {weight.layer for weight in architecture.weights if weight.role == "routed_expert"}
    # Layers that only predict further tokens ahead lie behind the others, and no trainer loads them.
    return tuple(sorted(each for each in layers if each is not None and each < architecture.num_layers))


def _is_named(weight: Weight, target: str) -> bool:
    return target in (weight.target, module_name(weight)) or module_name(weight).endswith(f".{target}")
