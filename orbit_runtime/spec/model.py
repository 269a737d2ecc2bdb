"""`spec.model`: the frozen base."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from orbit_runtime.spec.block import IDENTITY, LAYOUT, Block, Uri
from orbit_runtime.spec.rule import MODEL_ON_HUB, uri_rule

MODEL_SCHEMES = ("builtin", "file", "hf", "s3", "pvc")
Precision = Literal["Auto", "BF16", "FP8", "INT4", "NVFP4", "MXFP4"]
ActivationPrecision = Literal["WeightOnly", "FP8", "NVFP4"]


class Model(Block):
    """The base model: frozen, at its deployment precision."""

    uri: Annotated[Uri, LAYOUT, Field(examples=["builtin://tiny-adder"])]
    """A folder in Hugging Face format: a path, `file:///…`, `hf://org/name@revision`, `s3://bucket/prefix`, on a
    cluster `pvc://claim/path`, or `builtin://tiny-adder`, which ships with Orbit. It may move on resume, because a run
    identifies its model by digest."""
    precision: Annotated[Precision, IDENTITY] = "Auto"
    """Checked against the checkpoint; a mixed checkpoint counts as the format of its routed experts. For `builtin://`
    it selects the variant, and `Auto` means `INT4`."""
    activation_precision: Annotated[ActivationPrecision, IDENTITY] = "WeightOnly"
    """`WeightOnly` does not round activations. `FP8` (W8A8) and `NVFP4` (W4A4) round the inputs of linear layers whose
    weights are in that format, like an engine that multiplies in it; the gradient passes straight through. On a GPU,
    SGLang is asked for kernels that do the same."""
    max_sequence_length: Annotated[int, IDENTITY, Field(ge=2, le=1_048_576)] = 2048
    """Maximum length of prompt plus completion, in tokens. A longer prompt is an error, a longer completion is cut."""

    rules = (uri_rule(MODEL_SCHEMES), MODEL_ON_HUB)
