"""`spec.rollout`: how completions are sampled.

Belongs here: the engine and the distribution. Does not belong here: generation (`rollout`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from orbit_runtime.spec.block import IDENTITY, LAYOUT, AsTuple, Block


class Sampling(Block):
    """The distribution that tokens are drawn from."""

    temperature: Annotated[float, IDENTITY, Field(gt=0, le=100)] = 1.0
    """Divides the logits; training uses the same distribution."""
    top_p: Annotated[float, IDENTITY, Field(gt=0, le=1)] = 1.0
    """Draw only from the most likely tokens that together reach this probability."""
    max_new_tokens: Annotated[int, IDENTITY, Field(ge=1, le=1_048_576)] = 256
    """A completion is cut at this length."""
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...],
        AsTuple,
        IDENTITY,
        Field(max_length=16, examples=[["</answer>"]]),
    ] = ()
    """Texts that end a completion, besides the model's own end tokens."""


class Rollout(Block):
    """Sampling."""

    engine: Annotated[Literal["Auto", "Torch", "SGLang"], LAYOUT] = "Auto"
    """What samples: `Torch` runs in the trainer's process on the same weights; `SGLang` is a server that Orbit starts
    beside it, for LoRA and OFT with `topP: 1`."""
    sampling: Sampling = Sampling()
    """The distribution that tokens are drawn from."""
    max_running_requests: Annotated[int, LAYOUT, Field(ge=1, le=1_000_000)] = 512
    """Completions that are sampled at the same time; lower it to save memory."""
