"""`spec.data`: the prompts.

Belongs here: where prompts come from and in which order. Does not belong here: reading them (`data`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from orbit_runtime.spec.block import (
    IDENTITY,
    LATER_IDENTITY,
    LAYOUT,
    AsTuple,
    Block,
    Contradiction,
    Uri,
    check_scheme,
)

PROMPT_SCHEMES = ("builtin", "file", "hf", "s3", "pvc")


class Prompts(Block):
    """One source of prompts."""

    uri: Annotated[Uri, LAYOUT, Field(examples=["builtin://two-digit-addition"])]
    """A file, or a folder of files that are read in the order of their names: a path, `file:///…`,
    `hf://datasets/org/name@revision/file`, `s3://bucket/key` (`s3://bucket/folder/` is a folder), on a cluster
    `pvc://claim/path`, or `builtin://two-digit-addition`, `builtin://sums-of-99`, `builtin://two-digit-multiplication`
    and `builtin://small-functions`, which ship with Orbit. It may move on resume: a run knows its prompts by digest."""
    format: Annotated[Literal["Auto", "JSONL", "CSV", "Parquet", "Arrow"], IDENTITY] = "Auto"
    """`Auto` goes by the end of the name: `.parquet` is Parquet, `.arrow` Arrow, `.csv` CSV with a header, everything
    else JSON lines; CSV and JSON lines also as `.gz` or `.zst`. A folder that `datasets` saved is Arrow. Cells of CSV
    are text as they stand."""
    prompt_field: Annotated[str, IDENTITY, Field(min_length=1, max_length=128)] = "prompt"
    """Column with the prompt: text, which becomes one user message, or a list of chat messages."""
    completion_field: Annotated[
        str | None, LATER_IDENTITY, Field(min_length=1, max_length=128, examples=["answer"])
    ] = None
    """Of `algorithm.type: SFT`: column with the answer to learn, text or chat messages. Unset, `promptField` holds
    whole conversations. Without SFT it is a column like any other."""
    tools_field: Annotated[str | None, LATER_IDENTITY, Field(min_length=1, max_length=128, examples=["tools"])] = None
    """Of `algorithm.type: SFT`: column with the JSON schemas of the functions that the conversation may call."""

    weight: Annotated[float | None, LATER_IDENTITY, Field(gt=0, le=1_000_000, examples=[3])] = None
    """Share of the prompts that are drawn from this source, against the others' weights; beside one that has one, a
    source without counts 1. Each goes through epochs of its own. Unset everywhere, all are drawn as one."""

    def contradictions(self) -> Iterator[Contradiction]:
        yield from check_scheme("uri", self.uri, PROMPT_SCHEMES)


class Chat(Block):
    """How messages become the model's text."""

    template_arguments: Annotated[
        dict[str, JsonValue], LATER_IDENTITY, Field(max_length=32, examples=[{"enable_thinking": False}])
    ] = Field(default_factory=dict)
    """What the model's chat template is rendered with besides messages and tools."""
    answers: Annotated[Literal["All", "Last"], LATER_IDENTITY] = "All"
    """Of `algorithm.type: SFT`: which of a conversation's answers are learned; those before the last are read only."""


class Validation(Block):
    """Demonstrations that are held out, and what is done with what they say."""

    share: Annotated[float, LATER_IDENTITY, Field(gt=0, lt=1)] = 0.05
    """Share of the rows that is held out, at least one; which ones, `seed` decides."""
    every_steps: Annotated[int, LATER_IDENTITY, Field(ge=1, le=1_000_000)] = 50
    """They are measured before the first step, after every so many, and after the last."""
    patience: Annotated[int | None, LATER_IDENTITY, Field(ge=1, le=1_000_000)] = None
    """The run ends after so many measurements in a row that were no better than the best; unset, it does not."""


class Difficulty(Block):
    """Which prompts are worth sampling, by how often the policy solves them."""

    low: Annotated[float, LATER_IDENTITY, Field(ge=0, le=0.5)] = 0.05
    """Prompts whose running pass rate is lower are passed over."""
    high: Annotated[float, LATER_IDENTITY, Field(ge=0.5, le=1)] = 0.95
    """So are those whose rate is higher."""
    pass_at: Annotated[float, LATER_IDENTITY, Field(ge=-1_000_000, le=1_000_000)] = 1.0
    """Reward from which on a rollout passed. The newest visit of a prompt counts as much as all before it."""
    revisit_epochs: Annotated[int | None, LATER_IDENTITY, Field(ge=1, le=1_000_000)] = None
    """A prompt that was passed over is sampled once more after so many epochs; unset, never."""


class Data(Block):
    """The prompts and their order. Every other column of a row goes to the rewards."""

    prompts: Annotated[
        tuple[Prompts, ...],
        AsTuple,
        Field(min_length=1, max_length=64, examples=[[{"uri": "builtin://two-digit-addition"}]]),
    ]
    """Sources, read one after the other."""
    chat: Chat = Chat()
    """How their messages become the model's text."""
    validation: Validation | None = None
    """Of `algorithm.type: SFT`: what is held out. Then an adapter is written when it is the best so far, else with each
    checkpoint. Unset, nothing is."""
    difficulty: Difficulty | None = None
    """Of runs with rewards: prompts that the policy always or never solves are passed over. Unset, none is."""
    limit: Annotated[int | None, IDENTITY, Field(ge=1, le=2**53)] = None
    """Use only so many prompts, the first ones; unset, all."""
    epochs: Annotated[int | None, IDENTITY, Field(ge=1, le=1_000_000)] = None
    """Stop when every prompt was used so often; unset, as often as the steps need. With weights a source that was used
    so often is drawn from no more."""
    seed: Annotated[int, IDENTITY, Field(ge=0, le=2**53)] = 0
    """Seed of the run: of the order of prompts, of sampling and of the adapter's first values."""
    shuffle: Annotated[bool, IDENTITY] = True
    """Another order in each epoch; `false` keeps the order of the file."""
