"""`spec.adapter`: the part that trains."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from orbit_runtime.spec.block import IDENTITY, LAYOUT, AsTuple, Block, Rule, Unique, Uri, uri_rule
from orbit_runtime.spec.storage import STORAGE_SCHEMES

AdapterType = Literal["LoRA", "OFT", "Full"]
ExpertLayout = Literal["Auto", "SharedOuter", "Shared", "PerExpert", "None"]
Parametrization = Literal["CayleyNeumann", "Cayley"]
TargetName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$")]
NEUMANN_TERMS = 5
COFT_EPS = 6e-5


class LoRA(Block):
    """`base(x) + (alpha / rank) · B(A(x))`, https://arxiv.org/abs/2106.09685."""

    rank: Annotated[int, IDENTITY, Field(ge=1, le=1024)] = 16
    """Inner size of the two low-rank matrices."""
    alpha: Annotated[float, IDENTITY, Field(gt=0, le=65536)] = 32.0
    """The update is scaled by `alpha / rank`."""
    rslora: Annotated[bool, IDENTITY] = False
    """Scale by `alpha / sqrt(rank)` instead, which suits high ranks, https://arxiv.org/abs/2312.03732."""
    dropout: Annotated[float, IDENTITY, Field(ge=0, lt=1)] = 0.0
    """Share of the adapter's inputs that a training pass drops, drawn anew for each micro-batch. The engine samples
    without dropout, so the trainer's log-probs then differ from the engine's by more than rounding."""


class OFT(Block):
    """`base(x @ R)` with a block-diagonal rotation R, https://arxiv.org/abs/2506.19847."""

    block_size: Annotated[int, IDENTITY, Field(ge=2, le=4096)] = 32
    """Size of one rotation block; it must divide the input size of every target."""
    parametrization: Annotated[Parametrization, IDENTITY] = "CayleyNeumann"
    """How a skew-symmetric matrix becomes a rotation: exactly (`Cayley`) or by a truncated series (`CayleyNeumann`)."""
    neumann_terms: Annotated[int, IDENTITY, Field(ge=1, le=32)] = NEUMANN_TERMS
    """Number of terms in the series of `CayleyNeumann`."""
    coft: Annotated[bool, IDENTITY] = False
    """Keep every block close to the identity: constrained OFT, https://arxiv.org/abs/2306.07280."""
    coft_eps: Annotated[float, IDENTITY, Field(gt=0, le=1)] = COFT_EPS
    """With `coft`: the norm of a block's parameters is at most this value divided by the root of the number of blocks.
    """

    rules = (
        Rule(
            "neumannTerms",
            f"self.parametrization != 'Cayley' || self.neumannTerms == {NEUMANN_TERMS}",
            "the exact `Cayley` transform has no series, so this field does nothing",
            "remove `neumannTerms`, or write `parametrization: CayleyNeumann`",
        ),
        Rule(
            "coftEps",
            f"self.coft || self.coftEps == {COFT_EPS}",
            "rotations are not constrained, so this field does nothing",
            "remove `coftEps`, or write `coft: true`",
        ),
    )


class Adapter(Block):
    """The adapter: the only trained weights, except with `type: Full`."""

    type: Annotated[AdapterType, IDENTITY] = "LoRA"
    """Kind of adapter; its settings are in the block of the same name. `Full` has no adapter: every weight of the model
    trains. The model must then be BF16, learns from demonstrations only, and trains in one process."""
    lora: LoRA | None = Field(default_factory=lambda data: LoRA() if data["type"] == "LoRA" else None)
    """Settings of `type: LoRA`; not allowed otherwise."""
    oft: OFT | None = Field(default_factory=lambda data: OFT() if data["type"] == "OFT" else None)
    """Settings of `type: OFT`; not allowed otherwise."""
    targets: Annotated[
        tuple[TargetName, ...] | None,
        AsTuple,
        IDENTITY,
        Field(min_length=1, max_length=64, examples=[["q_proj", "v_proj"]]),
    ] = None
    """Linear layers that get an adapter, given by the end of their module names. A target that matches nothing is an
    error. If unset, the usual targets of the model family: every projection of attention and MLPs, except those that
    engines fold into others."""

    init_from: Annotated[Uri | None, LAYOUT, Field(examples=["runs/sft"])] = None
    """Adapter that the run starts from, with a fresh optimiser: the folder of one (`…/adapters/policy-v40`, in PEFT's
    format), or a run folder, of which the adapter is taken that did best in the run's evaluations, or else the newest
    (`runs/sft@newest` and `runs/sft@step-40` name others). Its base and its own settings must match this manifest. It
    may move on resume, because a run identifies it by digest. If unset, the first adapter changes nothing."""
    experts: Annotated[ExpertLayout, IDENTITY] = "Auto"
    """Adapters of routed experts: one for each expert (`PerExpert`), one for all experts of a layer (`Shared`), one
    matrix for the side that faces the hidden state and an inner one for each expert (`SharedOuter`), or none (`None`).
    `Auto` is `SharedOuter` for LoRA and `Shared` for OFT."""

    @property
    def expert_layout(self) -> Literal["SharedOuter", "Shared", "PerExpert", "None"]:
        """`experts` with `Auto` decided."""
        if self.experts == "Auto":
            return "SharedOuter" if self.type == "LoRA" else "Shared"
        return self.experts

    rules = (
        *(
            Rule(
                kind.lower(),
                f"self.type == '{kind}' || !has(self.{kind.lower()})",
                f"settings of {kind}, but `type` is `{{self.type}}`",
                f"remove `{kind.lower()}`, or write `type: {kind}`",
            )
            for kind in ("LoRA", "OFT")
        ),
        uri_rule(STORAGE_SCHEMES, "initFrom", unless="!has(self.initFrom) || "),
        Unique("targets"),
    )
