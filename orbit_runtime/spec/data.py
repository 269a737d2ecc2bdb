"""`spec.data`: the prompts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from orbit_runtime.spec.block import (
    IDENTITY,
    LATER_IDENTITY,
    LAYOUT,
    PROMPTS_ON_HUB,
    AsTuple,
    Block,
    Uri,
    uri_rule,
)

PROMPT_SCHEMES = ("builtin", "file", "hf", "s3", "pvc")


class Prompts(Block):
    """One source of prompts."""

    uri: Annotated[Uri, LAYOUT, Field(examples=["builtin://two-digit-addition"])]
    """A file, or a folder whose files are read in the order of their names: a path, `file:///…`,
    `hf://datasets/org/name@revision/file`, `s3://bucket/key` (`s3://bucket/folder/` is a folder), on a cluster
    `pvc://claim/path`, or `builtin://two-digit-addition`, `builtin://sums-of-99`, `builtin://two-digit-multiplication`
    and `builtin://small-functions`, which ship with Orbit. It may move on resume, because a run identifies its prompts
    by digest."""
    format: Annotated[Literal["Auto", "JSONL", "CSV", "Parquet", "Arrow"], IDENTITY] = "Auto"
    """`Auto` follows the file extension: `.parquet` is Parquet, `.arrow` Arrow, `.csv` CSV with a header, everything
    else JSON lines; CSV and JSON lines may be compressed as `.gz` or `.zst`. A folder that `datasets` saved is Arrow.
    CSV cells are read as text, unchanged."""
    prompt_field: Annotated[str, IDENTITY, Field(min_length=1, max_length=128)] = "prompt"
    """Column with the prompt: text, which becomes one user message, or a list of chat messages."""
    completion_field: Annotated[
        str | None, LATER_IDENTITY, Field(min_length=1, max_length=128, examples=["answer"])
    ] = None
    """With `algorithm.type: SFT`: column with the completion to learn, text or chat messages. If unset, `promptField`
    holds whole conversations. Without SFT it is a column like any other."""
    tools_field: Annotated[str | None, LATER_IDENTITY, Field(min_length=1, max_length=128, examples=["tools"])] = None
    """With `algorithm.type: SFT`: column with the JSON schemas of the functions that the conversation may call."""

    weight: Annotated[float | None, LATER_IDENTITY, Field(gt=0, le=1_000_000, examples=[3])] = None
    """Weight of this source, relative to the others, when prompts are drawn. If any source has a weight, a source
    without one counts 1, and each source has epochs of its own. If none has a weight, all are drawn as one source."""

    rules = (uri_rule(PROMPT_SCHEMES), PROMPTS_ON_HUB)


class Chat(Block):
    """How messages become the model's text."""

    template_arguments: Annotated[
        dict[str, JsonValue], LATER_IDENTITY, Field(max_length=32, examples=[{"enable_thinking": False}])
    ] = Field(default_factory=dict)
    """Arguments that the model's chat template is rendered with, besides messages and tools."""
    keep_tokens: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...],
        AsTuple, LATER_IDENTITY, Field(max_length=64, examples=[["<think>", "</think>"]]),
    ] = ()  # fmt: skip
    """Special tokens that stay in the text that rewards and environments read; all others are left out of it."""
    answers: Annotated[Literal["All", "Last"], LATER_IDENTITY] = "All"
    """With `algorithm.type: SFT`: which answers of a conversation are learned; with `Last`, earlier ones are only read.
    """


class Validation(Block):
    """Demonstrations that are held out, and how their loss is used."""

    share: Annotated[float, LATER_IDENTITY, Field(gt=0, lt=1)] = 0.05
    """Share of the rows that is held out, at least one row; `seed` decides which."""
    every_steps: Annotated[int, LATER_IDENTITY, Field(ge=1, le=1_000_000)] = 50
    """Interval of measurements, in steps; they are also measured before the first step and after the last."""
    patience: Annotated[int | None, LATER_IDENTITY, Field(ge=1, le=1_000_000)] = None
    """The earlier form of `training.stopWhen.withoutGainSteps`, in measurements instead of steps; beside `stopWhen` it
    has no effect. The next version no longer reads it."""


class Difficulty(Block):
    """Which prompts are worth sampling, by how often the policy solves them."""

    low: Annotated[float, LATER_IDENTITY, Field(ge=0, le=0.5)] = 0.05
    """Prompts whose running pass rate is below this are skipped."""
    high: Annotated[float, LATER_IDENTITY, Field(ge=0.5, le=1)] = 0.95
    """Prompts whose running pass rate is above this are skipped."""
    pass_at: Annotated[float, LATER_IDENTITY, Field(ge=-1_000_000, le=1_000_000)] = 1.0
    """Reward from which on a rollout counts as passed. In the running rate, the newest visit of a prompt counts as much
    as all earlier ones."""
    revisit_epochs: Annotated[int | None, LATER_IDENTITY, Field(ge=1, le=1_000_000)] = None
    """A skipped prompt is sampled once more after this many epochs; if unset, never."""


class Data(Block):
    """The prompts and their order. Every other column of a row is passed to the rewards."""

    prompts: Annotated[
        tuple[Prompts, ...],
        AsTuple,
        Field(min_length=1, max_length=64, examples=[[{"uri": "builtin://two-digit-addition"}]]),
    ]
    """Sources, read one after the other."""
    chat: Chat = Chat()
    """How their messages become the model's text."""
    validation: Validation | None = None
    """With `algorithm.type: SFT`: what is held out. An adapter is then written when it is the best so far, otherwise
    with each checkpoint. If unset, nothing is held out."""
    difficulty: Difficulty | None = None
    """For runs with rewards: skip prompts that the policy always or never solves. If unset, none is skipped."""
    limit: Annotated[int | None, IDENTITY, Field(ge=1, le=2**53)] = None
    """Number of prompts to use, counted from the first; if unset, all."""
    epochs: Annotated[int | None, IDENTITY, Field(ge=1, le=1_000_000)] = None
    """Stop when every prompt has been used this many times; if unset, as often as the steps need. With weights, a
    source that has been used this many times is not drawn from again."""
    seed: Annotated[int, IDENTITY, Field(ge=0, le=2**53)] = 0
    """Seed of the run: for the order of prompts, sampling, and the adapter's initial values."""
    shuffle: Annotated[bool, IDENTITY] = True
    """Use a different order in each epoch; `false` keeps the order of the file."""
