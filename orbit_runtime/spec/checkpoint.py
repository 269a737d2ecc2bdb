"""`spec.checkpoint`: how often a run is kept. Writing and reading checkpoints is in `storage` and `loop`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from orbit_runtime.spec.block import DISPLAY, IDENTITY, Block


class Checkpoint(Block):
    """How much a killed run can lose, and how many checkpoints are kept."""

    every_steps: Annotated[int, DISPLAY, Field(ge=1, le=1_000_000)] = 1
    """Number of steps between checkpoints; the last step always gets one."""
    keep: Annotated[int, DISPLAY, Field(ge=1, le=1_000_000)] = 3
    """Number of newest complete checkpoints to keep; older ones are deleted."""
    resume_from: Annotated[
        str | None, IDENTITY, Field(min_length=1, max_length=1024, examples=["s3://bucket/runs/quickstart"])
    ] = None
    """Another run's folder, or one checkpoint in it (`…/checkpoints/step-000060`): a new run starts with its adapter,
    its optimiser and its step. The base and `adapter` must be the same; everything else may differ."""
