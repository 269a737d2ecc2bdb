"""The NetworkPolicy of a run: requests for its state may enter; only DNS, HTTPS and declared egress may leave.
The pods of a run over several nodes may also talk to each other."""

from __future__ import annotations

from orbit_operator.manifests.source import RUN_UID, Object, RunSource, metadata, metrics_port_of
from orbit_operator.settings import Settings
from orbit_runtime.spec.placement import Egress

NAMESPACE_NAME = "kubernetes.io/metadata.name"


def build_network_policy(source: RunSource, settings: Settings) -> Object:
    """Selects only the pods of this run."""
    ingress: list[Object] = []
    if (port := metrics_port_of(source.spec)) is not None:
        callers = sorted({settings.namespace, *settings.scrape_namespaces})
        ingress = [
            {
                "from": [_namespaces(callers)],
                "ports": [{"protocol": "TCP", "port": port}],
            }
        ]
    among: list[Object] = []
    if source.manifest.spec.placement.nodes > 1:
        # Ranks, their head and the run may use any port: Ray and the collectives choose ports dynamically.
        among = [{"podSelector": {"matchLabels": {RUN_UID: source.uid}}}]
        ingress.append({"from": among})
    dns = [{"protocol": protocol, "port": int(port)} for port in settings.dns_ports for protocol in ("UDP", "TCP")]
    https: Object = {"ports": [{"protocol": "TCP", "port": 443}]}
    if settings.https_cidrs:
        https["to"] = [{"ipBlock": {"cidr": each}} for each in settings.https_cidrs]
    egress: list[Object] = [{"ports": dns}, https]
    named = dict.fromkeys((*source.manifest.spec.placement.egress, *settings.run_egress))
    egress += [_egress(each) for each in named]
    egress += [{"to": among}] if among else []
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(source, source.name, component="network"),
        "spec": {
            "podSelector": {"matchLabels": {RUN_UID: source.uid}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress,
            "egress": egress,
        },
    }


def _egress(each: Egress) -> Object:
    to = {"ipBlock": {"cidr": each.cidr}} if each.cidr is not None else _namespaces([each.namespace or ""])
    ports = [{"protocol": "TCP", "port": port} for port in each.ports]
    return {"to": [to], **({"ports": ports} if ports else {})}


def _namespaces(names: list[str]) -> Object:
    return {"namespaceSelector": {"matchExpressions": [{"key": NAMESPACE_NAME, "operator": "In", "values": names}]}}
