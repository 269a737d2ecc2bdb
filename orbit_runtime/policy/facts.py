"""Facts about a model, for a run that does not hold it: plain values, which are sent between processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orbit_runtime.adapters.config import AdapterConfig, InjectReport, join_reports
from orbit_runtime.errors import ManifestError
from orbit_runtime.planner.support.served import Place, ServedAdapter

if TYPE_CHECKING:
    from orbit_runtime.policy.model import Policy


@dataclass(frozen=True, slots=True)
class RoutedFacts:
    """Facts of a model whose tokens can be sent to given experts."""

    num_layers: int
    """Number of all layers, including those without routed experts."""
    layers: tuple[int, ...]
    """Layers with routed experts."""
    experts_per_token: int


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """Equal for all processes that hold the same layers of a model; `join_facts` combines those of all layers."""

    vocabulary: int
    precision: str
    compute_dtype: str
    """`float32` or `bfloat16`."""
    adapter: AdapterConfig
    """The adapter, with its targets even if the manifest left them to the model."""
    layers: tuple[str, ...]
    """Names of the adapted modules."""
    modules: frozenset[str]
    """Names of all modules."""
    report: InjectReport
    expert_formats: tuple[str, ...]
    """Packed formats of the adapted routed experts."""
    group_size: int | None
    """Columns of the packed base that share a scale; None if it has no groups."""
    routed: RoutedFacts | None
    """None without routed experts, or if the routers cannot be given another choice."""

    def served(
        self, place: Place, *, capability: tuple[int, int] | None = None, deterministic: bool = False
    ) -> ServedAdapter:
        """The facts that the support table needs before servers may apply the adapter."""
        adapter = self.adapter
        return ServedAdapter(
            adapter.type, adapter.expert_layout, adapter.rank, adapter.scaling, adapter.rslora, self.layers,
            self.modules, self.expert_formats, place, capability, deterministic,
        )  # fmt: skip


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
        else RoutedFacts(
            int(policy.model.config.get_text_config().num_hidden_layers), routing.layers, routing.experts_per_token
        ),
    )


def join_facts(stages: Sequence[PolicyFacts]) -> PolicyFacts:
    """Facts of a whole model, from processes that hold consecutive runs of its layers.

    Raises:
        ManifestError: none of them has a target of the adapter.
    """
    first, report = stages[0], join_reports([each.report for each in stages])
    if len(stages) == 1:
        return first
    missing = set(first.adapter.targets) - {row.target for row in report.rows}
    if missing:
        raise ManifestError(f"{min(missing)!r} matches no linear layer of the model", where="spec.adapter.targets")
    routed = [each.routed for each in stages if each.routed is not None]
    return replace(
        first,
        layers=tuple(name for each in stages for name in each.layers),
        modules=frozenset[str]().union(*(each.modules for each in stages)),
        report=report,
        expert_formats=tuple(sorted({name for each in stages for name in each.expert_formats})),
        group_size=next((each.group_size for each in stages if each.group_size is not None), None),
        routed=replace(routed[0], layers=tuple(layer for each in routed for layer in each.layers)) if routed else None,
    )
