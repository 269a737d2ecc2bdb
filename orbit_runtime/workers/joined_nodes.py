"""The number of nodes of a run, as seen by its process.

Belongs here: reading `RAY_ADDRESS`, Ray's own variable. Does not belong here: joining them (`ray_driver`).
"""

from __future__ import annotations

import os

from orbit_runtime.spec.placement import Placement

RAY_ADDRESS = "RAY_ADDRESS"


def joined_nodes(placement: Placement) -> int:
    """`placement.nodes` if a Ray cluster is named; else 1: a machine is used as it is, as with `placement.gpus`."""
    return placement.nodes if ray_address() else 1


def ray_address() -> str | None:
    """`HOST:PORT` of the head of a Ray cluster."""
    return os.environ.get(RAY_ADDRESS) or None
