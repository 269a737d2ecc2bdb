"""Wraps the target layers of a model in an adapter, and reports what matched.

Belongs here: matching, wrapping, creating masters. Does not belong here: loading the model, files.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from orbit_runtime.adapters.config import AdapterConfig, InjectReport, ReportRow
from orbit_runtime.adapters.expert_layer import AdaptedExpertLinear
from orbit_runtime.adapters.layer import TRAINER_SLOT, AdaptedLinear, Selection
from orbit_runtime.adapters.lora import initial_A
from orbit_runtime.adapters.masters import MasterPlace, Masters
from orbit_runtime.adapters.oft import check_block_size
from orbit_runtime.adapters.part import WeightPart
from orbit_runtime.errors import InternalError, ManifestError
from orbit_runtime.model_info.weights import SHARED_INPUTS

AdaptedLayer = AdaptedLinear | AdaptedExpertLinear


@dataclass(frozen=True, eq=False)
class InjectedAdapter:
    """A model's adapter: the wrapped layers, and the masters that are trained."""

    config: AdapterConfig
    report: InjectReport
    selection: Selection
    layers: dict[str, AdaptedLayer]
    """Module name before injection → layer, in the model's order."""
    masters: Masters

    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters, each once, sorted by name."""
        return list(self.masters.parameters.values())


def inject(
    model: nn.Module,
    targets: Sequence[str],
    adapter: AdapterConfig,
    seed: int,
    *,
    compute_dtype: torch.dtype = torch.float32,
    left_out: Sequence[str] = (),
    is_part: bool = False,
    announce: Callable[[InjectReport], None] | None = None,
) -> InjectedAdapter:
    """Wraps every linear layer whose name ends with a target, in place, and freezes everything else in the model.

    Args:
        left_out: parts of module names; layers with such a name are never targets.
        is_part: other processes hold other layers, so a target without a match here may match there.
        announce: called with the adapter's size before any of it is allocated.
    """
    matched = _match(model, targets, left_out, is_part)
    if adapter.expert_layout == "None":
        matched = {name: pair for name, pair in matched.items() if not hasattr(pair[1], "num_experts")}
    for name, (_, layer) in matched.items():
        _check_size(name, layer, adapter)
    model.requires_grad_(False)
    selection = Selection(compute_dtype)
    layers: dict[str, AdaptedLayer] = {}
    for name, (_, base) in matched.items():
        kind = AdaptedExpertLinear if hasattr(base, "num_experts") else AdaptedLinear
        layers[name] = kind(base, name, adapter, selection)
    owner = owners(layers) if adapter.type == "OFT" else {name: name for name in layers}
    report = _report(matched, layers, owner)
    if announce is not None:
        announce(report)
    for name, adapted in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, adapted)
    masters = _create_masters(layers, owner, adapter, seed)
    selection.applied_masters[TRAINER_SLOT] = lambda *which: masters.applied(selection.compute_dtype, *which)
    return InjectedAdapter(adapter, report, selection, layers, masters)


def add_masters(injected: InjectedAdapter, slot: str, adapter: AdapterConfig, seed: int) -> Masters:
    """A further adapter of the same kind around the same layers, in its own slot; the model's adapter is unchanged."""
    layers, owner = injected.layers, injected.masters.owner
    for name, layer in layers.items():
        _check_size(name, layer.base, adapter)
    parameters, places = {}, {}
    for name, layer in layers.items():
        if owner[name] == name:
            for kind, parameter in _initial(layer, seed, adapter):
                parameters[f"{name}.{kind}"] = parameter
                places[f"{name}.{kind}"] = MasterPlace(kind, layer.part, layer.shapes(adapter)[kind])
    masters = Masters(adapter, dict(sorted(parameters.items())), owner, places)
    selection = injected.selection
    selection.applied_masters[slot] = lambda *which: masters.applied(selection.compute_dtype, *which)
    return masters


def _check_size(name: str, layer: nn.Module, adapter: AdapterConfig) -> None:
    (out_features, in_features), held = _linear_shape(layer), int(layer.in_features)  # type: ignore[arg-type]
    if adapter.type == "OFT":
        check_block_size(name, held, adapter.block_size)
    elif adapter.rank > min(out_features, in_features):
        raise ManifestError(
            f"rank {adapter.rank} is more than {name} has, which is [{out_features}, {in_features}]",
            where="spec.adapter.lora.rank",
            fix=f"write at most {min(out_features, in_features)}, or leave the module out of spec.adapter.targets",
        )


def _match(
    model: nn.Module, targets: Sequence[str], left_out: Sequence[str], is_part: bool
) -> dict[str, tuple[str, nn.Module]]:
    """Module name → (the first target that matches it, the layer), in the model's order."""
    modules = dict(model.named_modules())
    if any(isinstance(module, (AdaptedLinear, AdaptedExpertLinear)) for module in modules.values()):
        raise InternalError("this model already has an adapter")
    linear = {
        name: module
        for name, module in modules.items()
        if hasattr(module, "in_features") and not any(part in name for part in left_out)
    }
    matched: dict[str, tuple[str, nn.Module]] = {}
    problems = []
    for target in targets:
        found = [name for name in linear if name == target or name.endswith(f".{target}")]
        if not found and not is_part:
            problems.append(_unmatched(target, linear))
        for name in found:
            matched.setdefault(name, (target, linear[name]))
    if problems:
        if len(problems) == 1:
            raise problems[0]
        message = f"{len(problems)} adapter targets match nothing"
        raise ManifestError(message, where="spec.adapter.targets", problems=tuple(problems))
    return {name: matched[name] for name in linear if name in matched}


def _unmatched(target: str, linear: dict[str, nn.Module]) -> ManifestError:
    short = sorted({name.rpartition(".")[2] for name in linear})
    near = difflib.get_close_matches(target.rpartition(".")[2], short, n=3)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    return ManifestError(
        f"{target!r} matches no linear layer of the model",
        where="spec.adapter.targets",
        fix=f"{hint}The model's linear layers are called {', '.join(short)}",
    )


def _linear_shape(layer: nn.Module) -> tuple[int, int]:
    """The shape of the whole layer."""
    part: WeightPart | None = getattr(layer, "part", None)
    return part.shape if part else (int(layer.out_features), int(layer.in_features))  # type: ignore[arg-type]


def _create_masters(
    layers: dict[str, AdaptedLayer], owner: dict[str, str], adapter: AdapterConfig, seed: int
) -> Masters:
    shared = Counter(owner.values())
    parameters, places = {}, {}
    for name, layer in layers.items():
        layer.shares_input = shared[owner[name]] > 1
        if owner[name] == name:
            for kind, parameter in _initial(layer, seed, adapter):
                parameters[f"{name}.{kind}"] = parameter
                places[f"{name}.{kind}"] = MasterPlace(kind, layer.part, layer.shapes()[kind])
                layer.register_parameter(kind, parameter)
        else:
            layer.register_parameter("oft_R", parameters[f"{owner[name]}.oft_R"])
    return Masters(adapter, dict(sorted(parameters.items())), owner, places)


def _initial(layer: AdaptedLayer, seed: int, adapter: AdapterConfig) -> Iterator[tuple[str, nn.Parameter]]:
    for kind, shape in layer.shapes(adapter).items():
        values = initial_A(shape, seed, layer.name) if kind == "lora_A" else torch.zeros(shape)
        held = layer.part.cut(kind, values, adapter.block_size).clone()
        yield kind, nn.Parameter(held.to(layer.device))


def owners(layers: Mapping[str, AdaptedLayer]) -> dict[str, str]:
    """Each layer → the first layer, in the model's order, with the same input."""
    group_of = {short: group for group in SHARED_INPUTS for short in group}
    first: dict[tuple[str, object, int], str] = {}
    owner = {}
    for name, layer in layers.items():
        parent, _, short = name.rpartition(".")
        owner[name] = first.setdefault((parent, group_of.get(short, short), layer.in_features), name)
    return owner


def _report(
    matched: dict[str, tuple[str, nn.Module]], layers: Mapping[str, AdaptedLayer], owner: Mapping[str, str]
) -> InjectReport:
    rows, layout = [], next(iter(layers.values())).config.expert_layout if layers else "None"
    sizes = {
        name: sum(math.prod(shape) for shape in layer.shapes().values()) if owner[name] == name else 0
        for name, layer in layers.items()
    }
    for target in dict.fromkeys(target for target, _ in matched.values()):
        names = [name for name, (by, _) in matched.items() if by == target]
        shapes = Counter(_linear_shape(matched[name][1]) for name in names)
        count = sum(sizes[name] for name in names)
        experts = sum(isinstance(layers[name], AdaptedExpertLinear) for name in names)
        rows.append(ReportRow(target, len(names), tuple(sorted(shapes.items())), count, experts))
    return InjectReport(tuple(rows), sum(sizes.values()), layout)
