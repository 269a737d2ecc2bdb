"""`spec.checkpoint`: how often a run is kept. Writing and reading checkpoints is in `storage` and `loop`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from orbit_runtime.spec.block import DISPLAY, Block


class Checkpoint(Block):
    """What a killed run loses at most, and what stays."""

    every_steps: Annotated[int, DISPLAY, Field(ge=1, le=1_000_000)] = 1
    """A checkpoint after every so many steps, and always after the last one."""
    keep: Annotated[int, DISPLAY, Field(ge=1, le=1_000_000)] = 3
    """The newest complete checkpoints that stay; older ones are deleted."""
