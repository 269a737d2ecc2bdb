"""Ray actors for a rank and for a node's watch, which delegate everything.

Belongs here: actors. Does not belong here: what a rank does (`rank_process`). Imported by Ray's processes only.
"""

from __future__ import annotations

import ray

from orbit_runtime.workers.node_watch import NodeWatch
from orbit_runtime.workers.rank_process import RankFacts, RankFailure, RankProcess


class RankActor:
    """One rank. Its calls run one after the other in the main thread."""

    def __init__(self, rank: int, folder: str) -> None:
        self._process = RankProcess(rank, folder)

    def introduce(self) -> RankFacts:
        return self._process.introduce(str(ray.util.get_node_ip_address()))  # type: ignore[no-untyped-call]

    def introduce_node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def build(self, order: bytes, master: tuple[str, int]) -> bytes | RankFailure:
        return self._process.build(order, master)

    def run(self, method: str, arguments: bytes) -> bytes | RankFailure:
        return self._process.run(method, arguments)


class WatchActor(NodeWatch):
    """Watches the ranks on another node."""
