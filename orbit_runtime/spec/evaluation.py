"""`spec.evaluation`: how `orbit eval`, and a run, evaluate a policy.

Nothing here changes what is trained: all of it may change on resume, what stands in `environments` included.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from orbit_runtime.spec.block import AsTuple, Block
from orbit_runtime.spec.data import Prompts
from orbit_runtime.spec.environment import Environment
from orbit_runtime.spec.rule import Unique, scored_rule

LATER_DISPLAY: Any = Field(json_schema_extra={"orbitSet": "display", "orbitLater": True})
"""Unknown to earlier versions, whose runs behaved like its default."""


class EvaluationEnvironment(Block):
    """Prompts that are never trained on, and how completions for them are scored."""

    name: Annotated[
        str,
        LATER_DISPLAY,
        Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", examples=["held-out"]),
    ]
    """Unique name in results."""
    prompts: Annotated[
        tuple[Prompts, ...],
        AsTuple,
        Field(min_length=1, max_length=16, examples=[[{"uri": "held-out.jsonl"}]]),
    ]
    """Sources, read one after the other."""
    environment: Environment | None = None
    """What the policy acts in and what scores it; if unset, the run's own `spec.environment`."""

    rules = (scored_rule("!has(self.environment)"),)


class Evaluation(Block):
    """What `orbit eval` measures of a policy, and what a run measures of its own."""

    every_steps: Annotated[int | None, LATER_DISPLAY, Field(ge=1, le=1_000_000)] = None
    """Interval, in steps, at which a run evaluates its policy; also before its first step and after its last. If unset,
    never."""
    samples: Annotated[int, LATER_DISPLAY, Field(ge=1, le=1024)] = 1
    """Samples of each prompt."""
    temperature: Annotated[float | None, LATER_DISPLAY, Field(ge=0, le=100)] = None
    """0 takes the most likely token; if unset, as in `rollout.sampling`."""
    max_new_tokens: Annotated[int | None, LATER_DISPLAY, Field(ge=1, le=1_048_576)] = None
    """Maximum length of a completion; if unset, as in `rollout.sampling`."""
    limit: Annotated[int | None, LATER_DISPLAY, Field(ge=1, le=2**53)] = None
    """Number of prompts to use of each environment, counted from the first; if unset, all."""
    seed: Annotated[int, LATER_DISPLAY, Field(ge=0, le=2**53)] = 0
    """Seed of sampling. Every policy draws by the same seed, so that two policies differ only by what they are."""
    pass_at: Annotated[float, LATER_DISPLAY, Field(ge=-1_000_000, le=1_000_000)] = 1.0
    """Reward from which on a sample counts as passed, for pass@k."""
    concurrency: Annotated[int, LATER_DISPLAY, Field(ge=1, le=65_536)] = 64
    """Episodes that query the model at the same time; as many more may be scored meanwhile."""
    prompt_price: Annotated[float | None, LATER_DISPLAY, Field(ge=0, le=1_000_000)] = None
    """Price of a million tokens that a model reads. If set, the cost is reported."""
    completion_price: Annotated[float | None, LATER_DISPLAY, Field(ge=0, le=1_000_000)] = None
    """Price of a million tokens that a model writes."""
    environments: Annotated[
        tuple[EvaluationEnvironment, ...],
        AsTuple,
        Field(max_length=8, examples=[[{"name": "held-out", "prompts": [{"uri": "held-out.jsonl"}]}]]),
    ] = ()
    """What is measured; if empty, the run's own prompts and environment."""

    rules = (Unique("environments", "name", "environment"),)
