"""`spec.environment`: what answers the policy, and what scores it.

Belongs here: the environment, its limits and its rewards by name. Does not belong here: running them (`environments`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from orbit_runtime.spec.block import (
    IDENTITY,
    LATER_IDENTITY,
    LAYOUT,
    SHOWN,
    VARIABLE_PATTERN,
    AsTuple,
    Block,
    Entrypoint,
    Quantity,
    Rule,
    Unique,
    Uri,
    uri_rule,
)

CODE_SCHEMES = ("file", "s3", "pvc", "configmap")
EnvironmentType = Literal["SingleTurn", "MultiTurn", "Gymnasium", "SkyRLGym", "Verifiers"]
RewardType = Literal["ExactMatch", "Math", "MultipleChoice", "Pattern", "Length", "Code", "Judge"]


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


class Reward(Block):
    """A function that scores a completion; the reward of a rollout is the weighted sum of all rewards."""

    name: Annotated[
        str, IDENTITY, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", examples=["correct"])
    ]
    """Unique name in metrics and rollouts."""
    type: Annotated[RewardType | None, IDENTITY] = None
    """A reward that ships with Orbit; alternatively, set `entrypoint`."""
    entrypoint: Annotated[Entrypoint | None, IDENTITY, Field(examples=["my_rewards:brevity"])] = None
    """A function of yours, `module:function`; alternatively, set `type`."""
    weight: Annotated[float, IDENTITY, Field(ge=-1_000_000, le=1_000_000)] = 1.0
    """Weight of this reward in the sum."""
    timeout_seconds: Annotated[float, IDENTITY, Field(gt=0, le=86_400)] = 10.0
    """A call that takes longer is ended and counted as `timeout`, never scored as 0."""
    arguments: Annotated[dict[str, JsonValue], IDENTITY, Field(max_length=64)] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    rules = (
        Rule(
            "",
            "has(self.type) || has(self.entrypoint)",
            "a reward needs a `type` or an `entrypoint`",
            "add `type: ExactMatch`, or `entrypoint: module:function`",
        ),
        Rule(
            "entrypoint",
            "!has(self.type) || !has(self.entrypoint)",
            "a reward has a `type` or an `entrypoint`, not both",
            "remove one of them",
            server="remove type or entrypoint",
        ),
    )


class Code(Block):
    """Rewards and environments of your own, in addition to installed packages."""

    uri: Annotated[Uri, LAYOUT, Field(examples=["s3://bucket/my-rewards"])]
    """A folder or a `.zip` file that workers search first for modules: a path (such as one in the image), `file:///…`,
    `s3://bucket/prefix`, on a cluster `pvc://claim/path` or `configmap://name`. It may move on resume, because a run
    identifies its code by digest."""

    rules = (uri_rule(CODE_SCHEMES),)


class Environment(Block):
    """What the policy acts in."""

    type: Annotated[EnvironmentType, IDENTITY] = "SingleTurn"
    """`SingleTurn`: one prompt, one completion, scored. `MultiTurn`: the policy uses `tools`, or acts in the
    environment of yours that `entrypoint` names. The other types are environments of these packages, unchanged:
    docs/guides/environments.md."""
    entrypoint: Annotated[Entrypoint | None, LATER_IDENTITY, Field(examples=["my_games:Guess"])] = None
    """With `type: MultiTurn`: a class of yours, `module:Class`."""
    name: Annotated[str | None, LATER_IDENTITY, Field(min_length=1, max_length=256, examples=["gsm8k"])] = None
    """With a package's environments: the name under which the package registers it."""
    arguments: Annotated[dict[str, JsonValue], LATER_IDENTITY, Field(max_length=64)] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    tools: Annotated[
        tuple[Entrypoint, ...],
        AsTuple,
        LATER_IDENTITY,
        Field(max_length=64, examples=[["orbit_runtime.environments.tools.calculator:calculate"]]),
    ] = ()
    """With `type: MultiTurn`: functions that the policy may call, `module:function`."""
    limits: EnvironmentLimits = EnvironmentLimits()
    """Limits of an episode and its processes."""
    code: Code | None = None
    """Where the modules of `entrypoint` and `tools` are; if unset, on the Python path and next to the manifest."""
    variables: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256, pattern=VARIABLE_PATTERN)], ...],
        AsTuple,
        LAYOUT,
        Field(max_length=64, examples=[["OPENAI_API_KEY"]]),
    ] = ()
    """Environment variables of the run, by name, that rewards, environments and tools get besides those of the machine
    (paths, language, threads, caches, proxies) and those that `apiKeyEnv`, `valueEnv` and the argument `api_key_env`
    name. On a cluster they come from a Secret in `placement.envFromSecrets`."""
    rewards: Annotated[
        tuple[Reward, ...],
        AsTuple,
        SHOWN,
        Field(
            max_length=32,
            examples=[[{"name": "correct", "type": "ExactMatch", "arguments": {"field": "answer"}}]],
        ),
    ] = ()
    """Functions that score a completion, which is the last answer of an episode. A reward that the environment itself
    gives is added, as the part `environment`; with such an environment the list may be empty."""
    failure_limit: Annotated[float, IDENTITY, Field(ge=0, le=1)] = 0.1
    """Largest share of a step's samples whose reward or environment may time out or crash; above it the run stops (86).
    """

    @property
    def gives_reward(self) -> bool:
        """Whether it scores by itself, besides `rewards`."""
        return self.entrypoint is not None or self.name is not None

    rules = (
        Unique("rewards", "name", "reward"),
        Rule(
            "entrypoint",
            "!has(self.entrypoint) || self.type == 'MultiTurn'",
            "`type: {self.type}` uses no environment of your own",
            "remove it, or write `type: MultiTurn`",
        ),
        Rule(
            "tools",
            "!has(self.tools) || size(self.tools) == 0 || (self.type == 'MultiTurn' && !has(self.entrypoint))",
            "only `type: MultiTurn` without `entrypoint` calls tools",
            "remove them, or write `type: MultiTurn` without `entrypoint`",
        ),
        Rule(
            "type",
            "self.type != 'MultiTurn' || has(self.entrypoint) || (has(self.tools) && size(self.tools) > 0)",
            "nothing answers the policy",
            "add `tools`, or `entrypoint: module:Class`",
        ),
        Rule(
            "type",
            "self.type in ['SingleTurn', 'MultiTurn'] || has(self.name)",
            "`type: {self.type}` needs the name of an environment",
            "add `name`",
        ),
        Rule(
            "name",
            "!has(self.name) || !(self.type in ['SingleTurn', 'MultiTurn'])",
            "`type: {self.type}` uses no environment of a package",
            "remove it, or write `type: Gymnasium`",
        ),
        Rule(
            "arguments",
            "size(self.arguments) == 0 || has(self.entrypoint) || has(self.name)",
            "there is no environment that could use them",
            "remove them, or add `entrypoint` or `name`",
            rests_on=("type",),
            server=False,
        ),
        Rule(
            "rewards",
            "!(has(self.entrypoint) || has(self.name)) || self.rewards.all(r, r.name != 'environment')",
            "`environment`, rewards[{more}], is the reward of the environment itself",
            "give the reward another name",
            rests_on=("type",),
            more=lambda self: [reward.name for reward in self.rewards].index("environment"),
            server="give the reward environment another name",
        ),
    )
