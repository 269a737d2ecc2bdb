"""What a run has to know of the model that it trains, without holding it: plain values, which travel between processes.

Belongs here: reading them from a policy. Does not belong here: what a checkpoint alone says (`model_info`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.report import InjectReport

if TYPE_CHECKING:
    from orbit_runtime.policy.model import Policy


@dataclass(frozen=True, slots=True)
class RoutedFacts:
    """Of a model whose tokens can be sent to given experts."""

    num_layers: int
    """Of the model, those without routed experts included."""
    layers: tuple[int, ...]
    """With routed experts."""
    experts_per_token: int


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """The same for every process of a model that is divided among several, but for `report`."""

    vocabulary: int
    precision: str
    compute_dtype: str
    """`float32` or `bfloat16`."""
    adapter: AdapterConfig
    """With its targets, where the manifest left them to the model."""
    layers: tuple[str, ...]
    """Names of the adapted modules."""
    modules: frozenset[str]
    """Names of all."""
    report: InjectReport
    expert_formats: tuple[str, ...]
    """What the adapted routed experts are packed as."""
    group_size: int | None
    """Columns of the packed base that share a scale; None: it has no groups."""
    routed: RoutedFacts | None
    """None: no routed experts, or routers that no other choice can be given to."""


def describe(policy: Policy) -> PolicyFacts:
    from orbit_runtime.policy.snapshot import group_size_of

    layers = policy.injected.layers
    formats = {str(layer.base.format) for name, layer in layers.items() if ".experts." in name}
    routing = policy.routing
    return PolicyFacts(
        vocabulary=policy.vocabulary,
        precision=policy.precision,
        compute_dtype=str(policy.compute_dtype).removeprefix("torch."),
        adapter=policy.injected.config,
        layers=tuple(layers),
        modules=frozenset(name for name, _ in policy.model.named_modules()),
        report=policy.injected.report,
        expert_formats=tuple(sorted(formats)),
        group_size=group_size_of(policy),
        routed=None
        if routing is None
        else RoutedFacts(int(policy.model.config.num_hidden_layers), routing.layers, routing.experts_per_token),
    )
