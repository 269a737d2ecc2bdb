"""Whether a pod of a run is still alive."""

from __future__ import annotations

from collections.abc import Mapping

from orbit_operator.facts import NodeFacts, Observed, PodFacts

GRACE_AFTER_DELETION = 30.0
"""A working kubelet has removed a pod this long after its grace period."""
GRACE_AFTER_END = 30.0
"""Containers beside the run's own have this long to end by themselves."""


def is_lost(pod: PodFacts, nodes: Mapping[str, NodeFacts], now: float, limit: float) -> bool:
    """Whether the pod is being deleted and its node has been unreachable for at least `limit` seconds.

    If nodes may not be read, the taint manager's reason counts once a kubelet would have ended the pod.
    """
    if pod.is_terminal or pod.deletion_due is None or not pod.node:
        return False
    node = nodes.get(pod.node)
    if node is not None:
        return _is_gone(node, now, limit)
    return pod.disruption == "DeletionByTaintManager" and now > pod.deletion_due + GRACE_AFTER_DELETION


def is_stranded(pod: PodFacts, nodes: Mapping[str, NodeFacts], now: float, limit: float) -> bool:
    """Whether the node has been gone so long that the pod must be given up: it is deleted first, and then `is_lost`."""
    node = nodes.get(pod.node) if pod.node else None
    return not pod.is_terminal and not pod.is_deleting and node is not None and _is_gone(node, now, limit)


def live_pods(observed: Observed, now: float, limit: float) -> tuple[PodFacts, ...]:
    """Pods that may still write: neither ended nor on a lost node."""
    return tuple(pod for pod in observed.pods if not pod.is_terminal and not is_lost(pod, observed.nodes, now, limit))


def node_wake(observed: Observed, limit: float) -> float | None:
    """When a node of the run's pods that is not ready now will count as lost."""
    since = [
        node.not_ready_since + limit
        for node in (observed.nodes.get(pod.node) for pod in observed.pods if not pod.is_terminal)
        if node is not None and not node.is_ready and node.not_ready_since is not None
    ]
    return min(since, default=None)


def _is_gone(node: NodeFacts, now: float, limit: float) -> bool:
    since = None if node.is_ready else node.not_ready_since
    return not node.exists or (since is not None and now >= since + limit)
