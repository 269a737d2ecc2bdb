"""`spec.parity`: how far trainer and engine may differ. The measurement is in the package `parity`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from orbit_runtime.spec.block import IDENTITY, LAYOUT, Block


class Parity(Block):
    """Gate on the log-probs of trainer against engine."""

    preflight: Annotated[Literal["Enforce", "Report"], IDENTITY] = "Enforce"
    """Measured at start and after resume; above the limit, `Enforce` stops the run (84) and `Report` only reports."""
    mean_limit: Annotated[float | None, IDENTITY, Field(gt=0, le=100)] = None
    """Absolute limit of the mean |Δ log-prob|; if unset, the default of the base's precision."""
    p99_limit: Annotated[float | None, IDENTITY, Field(gt=0, le=1000)] = None
    """Limit of the 99th percentile of |Δ log-prob|; if unset, 8 times the limit of the mean. Like the next two limits,
    it applies from 1,000 tokens on."""
    k3_limit: Annotated[float | None, IDENTITY, Field(gt=0, le=1_000_000)] = None
    """Limit of the k3 estimate of the KL divergence; if unset, 16 times the square of the limit of the mean."""
    outside_limit: Annotated[float | None, IDENTITY, Field(gt=0, le=1)] = None
    """Limit of the share of tokens whose probability ratio lies outside [0.9, 1.1]; if unset, exp(-0.1 / limit of the
    mean)."""
    every_steps: Annotated[int | None, LAYOUT, Field(ge=1, le=1_000_000)] = None
    """Interval, in steps, of further measurements, on every server; if unset, only at start, after resume and the first
    wake."""
    floor_factor: Annotated[float, IDENTITY, Field(ge=1, le=1_000_000)] = 10.0
    """The limit is never below this many times the difference of one side from itself, nor above the absolute limit."""
    max_unproven: Annotated[int, LAYOUT, Field(ge=0, le=1_000_000)] = 16
    """Number of publishes in a row that may stay unproven, on servers that cannot read their slots back and are noisier
    than the adapter's effect on the canary; one more stops the run (84). Servers that Orbit starts prove every publish.
    """
