"""`spec.environment.limits`: what an episode and its processes may take.

Belongs here: bounds. Does not belong here: holding anything to them (`environments`, `workers`).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from orbit_runtime.spec.block import LATER_IDENTITY, LAYOUT, Block, Quantity


class EnvironmentLimits(Block):
    """Limits of a multi-turn episode, and of each process of an environment."""

    turns: Annotated[int, LATER_IDENTITY, Field(ge=1, le=10_000)] = 8
    """Answers of the policy in one episode; where an environment branches (`play`), along each branch. An episode that
    reaches a limit is scored as it is."""
    tokens: Annotated[int | None, LATER_IDENTITY, Field(ge=1, le=1_048_576)] = None
    """Tokens that the policy samples in one episode; where an environment branches, along each branch: all branches
    together may have more. If unset, as many as `model.maxSequenceLength` leaves. One turn has at most
    `rollout.sampling.maxNewTokens`."""
    seconds: Annotated[float, LATER_IDENTITY, Field(gt=0, le=86_400)] = 3600.0
    """Duration of an episode with all its branches, checked between turns."""
    step_seconds: Annotated[float, LATER_IDENTITY, Field(gt=0, le=86_400)] = 30.0
    """Duration of one answer of the environment, or of one tool call; a longer one is ended. If the environment is too
    slow, the episode is lost as `timeout`; if a tool is, the policy reads an error."""
    start_seconds: Annotated[float, LAYOUT, Field(gt=0, le=86_400)] = 120.0
    """Duration of importing the environment and the tools, which happens once."""
    memory: Annotated[Quantity, LAYOUT] = "1Gi"
    """Memory that one process may allocate beyond what the imports took."""
    processes: Annotated[int, LAYOUT, Field(ge=1, le=4096)] = 256
    """Number of processes at a time: an episode of an environment has one of its own, a tool call has one while it
    lasts. Further episodes wait."""
    may_fork: Annotated[bool, LAYOUT] = False
    """Whether these processes may start others, which end with them."""
