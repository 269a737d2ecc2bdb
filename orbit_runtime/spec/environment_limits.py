"""`spec.environment.limits`: what an episode and its processes may take.

Belongs here: bounds. Does not belong here: holding anything to them (`environments`, `workers`).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from orbit_runtime.spec.block import LATER_IDENTITY, LAYOUT, Block, Quantity


class EnvironmentLimits(Block):
    """What an episode of several turns, and each process of an environment, may take."""

    turns: Annotated[int, LATER_IDENTITY, Field(ge=1, le=10_000)] = 8
    """Answers of the policy in one episode. An episode that a limit ends is scored as it is."""
    tokens: Annotated[int | None, LATER_IDENTITY, Field(ge=1, le=1_048_576)] = None
    """Tokens that the policy samples in one episode; unset, as many as `model.maxSequenceLength` leaves. One turn has
    at most `rollout.sampling.maxNewTokens`."""
    seconds: Annotated[float, LATER_IDENTITY, Field(gt=0, le=86_400)] = 3600.0
    """Length of an episode, looked at between turns."""
    step_seconds: Annotated[float, LATER_IDENTITY, Field(gt=0, le=86_400)] = 30.0
    """One answer of the environment, or one call of a tool; what takes longer is ended. The episode is lost as
    `timeout`; of a tool, the policy reads an error."""
    start_seconds: Annotated[float, LAYOUT, Field(gt=0, le=86_400)] = 120.0
    """Importing the environment and the tools, once."""
    memory: Annotated[Quantity, LAYOUT] = "1Gi"
    """Memory that one process allocates beyond what importing took."""
    processes: Annotated[int, LAYOUT, Field(ge=1, le=4096)] = 256
    """Processes at the same time: an episode of an environment has one for itself, a call of a tool for as long as it
    takes. More episodes wait."""
    may_fork: Annotated[bool, LAYOUT] = False
    """Whether these processes may start others, which end with them."""
