"""`spec.adapter`: the part that trains.

Belongs here: the kinds of adapter and their settings. Does not belong here: their maths (`adapters`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from orbit_runtime.spec.block import (
    IDENTITY,
    LAYOUT,
    AsTuple,
    Block,
    Contradiction,
    Uri,
    check_scheme,
    check_unique,
)
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
    """Share of the adapter's inputs that a training pass leaves out, drawn for each micro-batch. The engine samples
    without it, so the trainer's log-probs then differ from the engine's by more than rounding."""


class OFT(Block):
    """`base(x @ R)` with a block-diagonal rotation R, https://arxiv.org/abs/2506.19847."""

    block_size: Annotated[int, IDENTITY, Field(ge=2, le=4096)] = 32
    """Size of one rotation block; it must divide the input size of every target."""
    parametrization: Annotated[Parametrization, IDENTITY] = "CayleyNeumann"
    """How a skew-symmetric matrix becomes a rotation: exactly (`Cayley`) or by a truncated series (`CayleyNeumann`)."""
    neumann_terms: Annotated[int, IDENTITY, Field(ge=1, le=32)] = NEUMANN_TERMS
    """Terms of the series of `CayleyNeumann`."""
    coft: Annotated[bool, IDENTITY] = False
    """Keep every block close to the identity: constrained OFT, https://arxiv.org/abs/2306.07280."""
    coft_eps: Annotated[float, IDENTITY, Field(gt=0, le=1)] = COFT_EPS
    """How close: the norm of a block's parameters is at most this over the root of the number of blocks."""

    def contradictions(self) -> Iterator[Contradiction]:
        if self.parametrization == "Cayley" and self.neumann_terms != NEUMANN_TERMS:
            yield Contradiction(
                ("neumannTerms",),
                (("parametrization",),),
                "the exact `Cayley` transform has no series, so this field does nothing",
                "remove `neumannTerms`, or write `parametrization: CayleyNeumann`",
            )
        if not self.coft and self.coft_eps != COFT_EPS:
            yield Contradiction(
                ("coftEps",),
                (("coft",),),
                "rotations are not constrained, so this field does nothing",
                "remove `coftEps`, or write `coft: true`",
            )


class Adapter(Block):
    """The adapter: the only weights that change, but for `type: Full`."""

    type: Annotated[AdapterType, IDENTITY] = "LoRA"
    """Which adapter; its settings stand in the block of the same name. `Full`: none, every weight of the model trains.
    The model is BF16 then, learns by demonstrations, and in one process."""
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
    """Linear layers that get an adapter, by the end of their module names. One that matches nothing is an error. Unset,
    the model family's usual ones: every projection of attention and MLPs, but none that engines fold into others."""

    init_from: Annotated[Uri | None, LAYOUT, Field(examples=["runs/sft"])] = None
    """A run folder, for its newest adapter, or the folder of one (`…/adapters/policy-v40`, PEFT's): the run begins with
    it, and with an optimizer of its own. The base and what it says of itself must be as here. It may move on resume: a
    run knows it by digest. Unset, the first adapter changes nothing."""
    experts: Annotated[ExpertLayout, IDENTITY] = "Auto"
    """Targets among routed experts: an adapter each (`PerExpert`), one for all of a layer (`Shared`), one for the side
    that faces the hidden state and an inner one each (`SharedOuter`), or `None`. `Auto`: LoRA `SharedOuter`, OFT
    `Shared`."""

    @property
    def expert_layout(self) -> Literal["SharedOuter", "Shared", "PerExpert", "None"]:
        """`experts` with `Auto` decided."""
        if self.experts == "Auto":
            return "SharedOuter" if self.type == "LoRA" else "Shared"
        return self.experts

    def contradictions(self) -> Iterator[Contradiction]:
        for name, kind, block in (("lora", "LoRA", self.lora), ("oft", "OFT", self.oft)):
            if block is not None and kind != self.type:
                yield Contradiction(
                    (name,),
                    (("type",),),
                    f"settings of {kind}, but `type` is `{self.type}`",
                    f"remove `{name}`, or write `type: {kind}`",
                )
        if self.init_from is not None:
            yield from check_scheme("initFrom", self.init_from, STORAGE_SCHEMES)
        yield from check_unique("targets", self.targets or ())
