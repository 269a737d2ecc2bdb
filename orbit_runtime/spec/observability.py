"""`spec.observability`: what a running run shows. Serving and writing it is in the package `observability`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from orbit_runtime.spec.block import DISPLAY, Block


class Observability(Block):
    """Metrics and logs."""

    metrics_port: Annotated[int, DISPLAY, Field(ge=-1, le=65535)] = 0
    """Port of `/metrics`, `/status`, `/healthz` and `/readyz`: 0 takes any free one (on a cluster 9400), -1 none."""
    log_level: Annotated[Literal["Debug", "Info", "Warning", "Error"], DISPLAY] = "Info"
    """The least important message that is logged."""
