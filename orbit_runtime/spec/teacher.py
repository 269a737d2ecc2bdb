"""`spec.algorithm.teacher`: whom the policy learns from, token by token, on what it sampled itself."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from orbit_runtime.spec.block import IDENTITY, LAYOUT, AsTuple, Block, Rule, Unique, Uri, uri_rule
from orbit_runtime.spec.rollout import Server
from orbit_runtime.spec.storage import STORAGE_SCHEMES

TeacherType = Literal["Base", "Adapter", "Average", "Lagged", "Served"]
Over = Literal["Full", "TopK", "Sampled"]
DECAY, EVERY_STEPS, TOP_K = 0.99, 10, 32
SERVED_TOP_K = 64
"""Largest `topK` of a served teacher: a rollout holds eight bytes for each of these at each of its tokens."""


class Teacher(Block):
    """On-policy distillation: a divergence from a teacher, added to the loss of each sampled token."""

    type: Annotated[TeacherType, IDENTITY] = "Base"
    """`Base`: the base with its adapter off. `Adapter`: one that was trained before. `Average`: a running average of
    the policy. `Lagged`: the policy some steps ago. These share the run's base; none is a second copy of it. `Served`:
    another model with the same tokenizer, behind `endpoints`; it takes `over: Sampled` or `over: TopK`."""
    uri: Annotated[Uri | None, LAYOUT, Field(examples=["runs/bigger/adapters/policy-v60"])] = None
    """Folder of the adapter: PEFT's, or a run's `adapters/policy-v…`; or an address in a run, such as `runs/a@best`."""
    endpoints: Annotated[
        tuple[Server, ...], AsTuple, Field(max_length=16, examples=[[{"url": "http://teacher:30000"}]])
    ] = ()
    """Servers of a `Served` teacher, SGLang or vLLM; all of them serve the same model. Each rollout is sent to the one
    that has least to do, as token ids."""
    decay: Annotated[float | None, IDENTITY, Field(ge=0, lt=1)] = None
    """Share of the average that a step leaves as it is; unset, 0.99."""
    every_steps: Annotated[int | None, IDENTITY, Field(ge=1, le=1_000_000)] = None
    """A lagged teacher becomes the policy after each so many steps; unset, 10."""
    coefficient: Annotated[float, IDENTITY, Field(gt=0, le=1000)] = 1.0
    """Weight of the divergence beside the algorithm's own loss."""
    over: Annotated[Over, IDENTITY] = "Full"
    """The divergence of the two distributions over the whole vocabulary; over the teacher's `topK` likeliest tokens and
    all others as one; or estimated from the token that was sampled."""
    top_k: Annotated[int | None, IDENTITY, Field(ge=1, le=100_000)] = None
    """Unset, 32. A `Served` teacher takes up to 64."""
    beta: Annotated[float, IDENTITY, Field(ge=0, le=1)] = 1.0
    """0: forward KL(teacher || student); 1: reverse KL(student || teacher); in between the generalised Jensen-Shannon
    divergence (GKD, https://arxiv.org/abs/2306.13649, eq. 1)."""
    preflight: Annotated[Literal["Enforce", "Report"], LAYOUT] = "Enforce"
    """Before the first step an `Adapter` or a `Served` teacher answers prompts as the policy does; one that earns less
    stops the run (84), or is only reported."""
    preflight_prompts: Annotated[int, LAYOUT, Field(ge=2, le=100_000)] = 64
    """How many prompts that takes."""

    @property
    def decided(self) -> Teacher:
        """A copy with the fields that its type and `over` read written out."""
        decay = (DECAY if self.decay is None else self.decay) if self.type == "Average" else None
        every = (self.every_steps or EVERY_STEPS) if self.type == "Lagged" else None
        top_k = (self.top_k or TOP_K) if self.over == "TopK" else None
        return self.model_copy(update={"decay": decay, "every_steps": every, "top_k": top_k})

    @property
    def is_column(self) -> bool:
        """Whether its report on a sample is one number a token, known before a step."""
        return self.over == "Sampled"

    @property
    def is_on_ranks(self) -> bool:
        """A trainer that is divided among ranks can ask it: they hold no second adapter, and each only a part of a
        token's distribution. Servers are asked by the loop, whoever trains."""
        return self.type == "Served" or (self.type == "Base" and self.is_column)

    rules = (
        uri_rule(STORAGE_SCHEMES, unless="!has(self.uri) || "),
        Rule(
            "type",
            "self.type != 'Adapter' || has(self.uri)",
            "`type: Adapter` needs the adapter that teaches",
            "add `uri: runs/<run>/adapters/policy-v…`",
        ),
        Unique("endpoints", "url"),
        Rule(
            "type",
            "self.type != 'Served' || (has(self.endpoints) && size(self.endpoints) > 0)",
            "`type: Served` needs the servers that teach",
            "add `endpoints: [{{url: http://host:port}}]`",
        ),
        Rule(
            "over",
            "self.type != 'Served' || self.over != 'Full'",
            "a server reports log-probs of single tokens, not the whole vocabulary's at every token",
            "write `over: TopK` or `over: Sampled`",
        ),
        Rule(
            "topK",
            f"self.type != 'Served' || !has(self.topK) || self.topK <= {SERVED_TOP_K}",
            f"of a served teacher, rollouts hold the {SERVED_TOP_K} likeliest tokens at most",
            f"write `topK: {SERVED_TOP_K}` or less",
        ),
        *(
            Rule(
                name,
                f"{absent} || self.type == '{owner}'",
                f"only `type: {owner}` reads it, so this field does nothing",
                f"remove `{name}`, or write `type: {owner}`",
            )
            for name, absent, owner in (
                ("uri", "!has(self.uri)", "Adapter"),
                ("decay", "!has(self.decay)", "Average"),
                ("everySteps", "!has(self.everySteps)", "Lagged"),
                ("endpoints", "!has(self.endpoints) || size(self.endpoints) == 0", "Served"),
            )
        ),
        Rule(
            "topK",
            "!has(self.topK) || self.over == 'TopK'",
            "`over: {self.over}` picks no likeliest tokens, so this field does nothing",
            "remove `topK`, or write `over: TopK`",
        ),
        Rule(
            "beta",
            "self.over != 'Sampled' || self.beta <= 0.0 || self.beta >= 1.0",
            "one sampled token says nothing about the mixture of two distributions",
            "write `beta: 0` or `beta: 1`, or `over: Full`",
        ),
    )
