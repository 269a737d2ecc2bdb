"""`spec.environment`: what answers the policy, and what scores it.

Belongs here: the environment and its rewards by name. Does not belong here: running them (`environments`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from orbit_runtime.spec.block import IDENTITY, LAYOUT, AsTuple, Block, Contradiction, Uri, check_scheme

CODE_SCHEMES = ("file", "s3", "pvc", "configmap")
RewardType = Literal["ExactMatch", "Math"]
Entrypoint = Annotated[
    str, Field(min_length=3, max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*$")
]


class Reward(Block):
    """One function that scores a completion; the reward of a rollout is the weighted sum of all."""

    name: Annotated[
        str, IDENTITY, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", examples=["correct"])
    ]
    """Its name in metrics and rollouts, each once."""
    type: Annotated[RewardType | None, IDENTITY] = None
    """A reward that ships with Orbit; or else `entrypoint`."""
    entrypoint: Annotated[Entrypoint | None, IDENTITY, Field(examples=["my_rewards:brevity"])] = None
    """A function of yours, `module:function`; or else `type`."""
    weight: Annotated[float, IDENTITY, Field(ge=-1_000_000, le=1_000_000)] = 1.0
    """Factor of this reward in the sum."""
    timeout_seconds: Annotated[float, IDENTITY, Field(gt=0, le=86_400)] = 10.0
    """A call that takes longer is ended and counted as `timeout`, never scored as 0."""
    arguments: Annotated[dict[str, JsonValue], IDENTITY, Field(max_length=64)] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    def contradictions(self) -> Iterator[Contradiction]:
        if self.type is not None and self.entrypoint is not None:
            yield Contradiction(
                ("entrypoint",),
                (("type",),),
                "a reward has a `type` or an `entrypoint`, not both",
                "remove one of them",
            )
        if self.type is None and self.entrypoint is None:
            yield Contradiction(
                (),
                (("type",), ("entrypoint",)),
                "a reward needs a `type` or an `entrypoint`",
                "add `type: ExactMatch`, or `entrypoint: module:function`",
            )


class Code(Block):
    """Rewards of your own, beside what is installed."""

    uri: Annotated[Uri, LAYOUT, Field(examples=["s3://bucket/my-rewards"])]
    """A folder or a `.zip` file that is put first where reward workers look for modules: a path (such as one of the
    image), `file:///…`, `s3://bucket/prefix`, on a cluster `pvc://claim/path` or `configmap://name`. It may move on
    resume: a run knows its code by digest."""

    def contradictions(self) -> Iterator[Contradiction]:
        yield from check_scheme("uri", self.uri, CODE_SCHEMES)


class Environment(Block):
    """What the policy acts in."""

    type: Annotated[Literal["SingleTurn"], IDENTITY] = "SingleTurn"
    """`SingleTurn`: one prompt, one completion, scored."""
    code: Code | None = None
    """Where the modules of `entrypoint` are; unset, on the Python path and beside the manifest."""
    rewards: Annotated[
        tuple[Reward, ...],
        AsTuple,
        Field(
            min_length=1,
            max_length=32,
            examples=[[{"name": "correct", "type": "ExactMatch", "arguments": {"field": "answer"}}]],
        ),
    ]
    """Functions that score a completion."""
    failure_limit: Annotated[float, IDENTITY, Field(ge=0, le=1)] = 0.1
    """Largest share of a step's samples whose reward may time out or crash; above it the run stops (86)."""

    def contradictions(self) -> Iterator[Contradiction]:
        names = [reward.name for reward in self.rewards]
        for index, name in enumerate(names):
            if names[:index].count(name) == 1:
                first = names.index(name)
                yield Contradiction(
                    ("rewards", index),
                    (("rewards", first, "name"),),
                    f"`{name}` is already the name of rewards[{first}]",
                    "give each reward its own name",
                )
