"""`spec.parity`: how far trainer and engine may differ. The measurement is in the package `parity`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from orbit_runtime.spec.block import IDENTITY, LAYOUT, Block


class Parity(Block):
    """Gate on the log-probs of trainer against engine."""

    preflight: Annotated[Literal["Enforce", "Report"], IDENTITY] = "Enforce"
    """Measured at start and after resume; above the limit, stop (84) or only report."""
    mean_limit: Annotated[float | None, IDENTITY, Field(gt=0, le=100)] = None
    """Absolute limit of the mean |Δ log-prob|; unset, the default of the base's precision."""
    floor_factor: Annotated[float, IDENTITY, Field(ge=1, le=1_000_000)] = 10.0
    """The limit is never below this many times what one side differs from itself, nor above the absolute limit."""
    max_unproven: Annotated[int, LAYOUT, Field(ge=0, le=1_000_000)] = 16
    """Publishes in a row that may go on unproven, where servers that cannot read their slots back are noisier than the
    adapter's effect on the canary; one more stops the run (84). Servers that Orbit starts prove every publish."""
