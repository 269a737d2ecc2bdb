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
    log_format: Annotated[Literal["Auto", "Text", "JSON"], DISPLAY] = "Auto"
    """Of progress and log: `Auto` is a live display on a terminal, JSON lines in a pod, and lines of text elsewhere."""
