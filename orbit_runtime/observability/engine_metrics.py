"""The engine's own metrics among the run's: what each server tells, under the run's labels and its replica's name.

Belongs here: reading one text format and giving its series new labels. Does not belong here: how a server is asked
(`rollout`), the run's own metrics (`metrics`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from orbit_runtime.types import ServerReading

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

PREFIXES = ("sglang", "vllm")
"""Families that speak of the engine; a server tells of its process and its HTTP too."""
REPLICA_LABEL = "replica"
ENGINE_METRICS = {
    "orbit_engine_up": "1 where the server takes work, 0 while it is being brought back.",
    "orbit_engine_memory_bytes": "What the server's device holds, or on a CPU its processes.",
    "orbit_engine_restarts_total": "Times that the server was lost and brought back with its adapters.",
    "orbit_engine_missed_adapters_total": "Adapters that did not arrive by `adapterTransport` and came as files.",
}


class EngineCollector:
    """A collector for `prometheus_client`'s registry: asks at every scrape, and keeps nothing."""

    def __init__(self, read: Callable[[], Sequence[ServerReading]], labels: Mapping[str, str]) -> None:
        """
        Args:
            labels: the run's, which every series gets.
        """
        self._read = read
        self._labels = labels

    def describe(self) -> list[Metric]:
        """Nothing: no server is asked before the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One family per name, however many servers tell it."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        readings = self._read()
        if not readings:
            return
        names = (*self._labels, REPLICA_LABEL)
        up = GaugeMetricFamily("orbit_engine_up", ENGINE_METRICS["orbit_engine_up"], labels=names)
        memory = GaugeMetricFamily(
            "orbit_engine_memory_bytes", ENGINE_METRICS["orbit_engine_memory_bytes"], labels=names
        )
        restarts = CounterMetricFamily(
            "orbit_engine_restarts", ENGINE_METRICS["orbit_engine_restarts_total"], labels=names
        )
        missed = CounterMetricFamily(
            "orbit_engine_missed_adapters", ENGINE_METRICS["orbit_engine_missed_adapters_total"], labels=names
        )
        families: dict[str, Metric] = {}
        for each in readings:
            values = (*self._labels.values(), each.replica)
            up.add_metric(values, float(each.is_up))
            restarts.add_metric(values, each.restarts)
            missed.add_metric(values, each.missed)
            if each.memory_bytes is not None:
                memory.add_metric(values, each.memory_bytes)
            for family in _relabelled(each.exposition, dict(zip(names, values, strict=True))):
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        yield from (up, restarts, missed, memory, *families.values())


def _relabelled(exposition: str, labels: Mapping[str, str]) -> list[Metric]:
    """Families of the engine; none where the text cannot be read."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        found = [each for each in text_string_to_metric_families(exposition) if each.name.startswith(PREFIXES)]
    except ValueError:
        return []
    for family in found:
        family.samples = [each._replace(labels={**each.labels, **labels}) for each in family.samples]
    return found
