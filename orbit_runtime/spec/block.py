"""Shared by every block of the manifest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator
from pydantic.alias_generators import to_camel

FieldSet = Literal["identity", "layout", "display"]

IDENTITY: Any = Field(json_schema_extra={"orbitSet": "identity"})
"""Changes the maths: a checkpoint of another identity is refused."""
LATER_IDENTITY: Any = Field(json_schema_extra={"orbitSet": "identity", "orbitLater": True})
"""The same, of a field that checkpoints of earlier versions do not know: at its default it is no part of the identity,
so that they can still be resumed."""


def later_identity(before: Any) -> Any:
    """`LATER_IDENTITY` of a field whose default depends on another: `before` is what earlier versions always did."""
    return Field(json_schema_extra={"orbitSet": "identity", "orbitLater": True, "orbitBefore": before})


LAYOUT: Any = Field(json_schema_extra={"orbitSet": "layout"})
"""Changes where and how it is computed, not what: may change on resume."""
DISPLAY: Any = Field(json_schema_extra={"orbitSet": "display"})
"""Changes how long the run is, and what it keeps and shows: may change on resume."""
LATER_DISPLAY: Any = Field(json_schema_extra={"orbitSet": "display", "orbitLater": True})
"""Unknown to earlier versions, whose runs behaved like its default. All of `evaluation` is in this set: nothing in it
changes what is trained, what stands in its `environments` included."""

SHOWN: Any = Field(json_schema_extra={"orbitShown": True})
"""Not needed by every kind of run, but written into a new manifest."""

Uri = Annotated[str, Field(min_length=1, max_length=1024)]
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=rf"^{_LABEL}(\.{_LABEL})*$")]
"""Name of a Kubernetes object."""
LabelName = Annotated[str, Field(min_length=1, max_length=63, pattern=rf"^{_LABEL}$")]
"""Name of a Kubernetes object whose name is part of another name, such as a namespace."""
MAX_LABEL_VALUE = 63
_LABEL_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
LabelValue = Annotated[str, Field(max_length=MAX_LABEL_VALUE, pattern=_LABEL_VALUE)]
"""Value of a Kubernetes label."""
LABEL_KEY = rf"^({_LABEL}(\.{_LABEL})*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?$"
MAX_LABEL_KEY = 317
Entrypoint = Annotated[
    str, Field(min_length=3, max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*$")
]
"""`module:function`."""
Quantity = Annotated[str, Field(min_length=1, max_length=20, pattern=r"^[1-9][0-9]*(Ki|Mi|Gi|Ti|k|M|G|T)?$")]
"""Bytes as Kubernetes writes them."""
VARIABLE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
"""Pattern of an environment variable's name."""
AsTuple = Strict(False)
"""A list in the file becomes a tuple here; its items stay strict."""


def _drop_none(value: Any) -> Any:
    return {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else value


WithoutEmpty = BeforeValidator(_drop_none)
"""A key without a value is left out of a mapping, as the API server does."""


class Contradiction(NamedTuple):
    """Fields that are each allowed and impossible together. Paths are relative to the block that found it."""

    at: tuple[str | int, ...]
    """The field to blame, e.g. `("oft",)`."""
    involves: tuple[tuple[str | int, ...], ...]
    """All other fields that the finding rests on: if one of them is itself wrong, the finding is omitted."""
    message: str
    fix: str


def is_label_key(text: str) -> bool:
    """Whether Kubernetes takes it as the key of a label or an annotation."""
    return len(text) <= MAX_LABEL_KEY and re.fullmatch(LABEL_KEY, text) is not None


def is_label_value(text: str) -> bool:
    return len(text) <= MAX_LABEL_VALUE and re.fullmatch(_LABEL_VALUE, text) is not None


class Block(BaseModel):
    """Closed and frozen; camelCase outside, snake_case inside; no value is converted into another kind."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        allow_inf_nan=False,
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        validate_by_alias=True,
        validate_by_name=True,
    )

    rules: ClassVar[tuple[Callable[[Any], Iterable[Contradiction]], ...]] = ()
    """Rules within a block of this kind, without its children's; most are of the kind `rule.Rule`."""

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, value: Any) -> Any:
        """A field without a value (`lora:`) is one that is left out, as it is for the API server."""
        if not isinstance(value, Mapping) or None not in value.values():
            return value
        fields = cls.model_fields.items()
        needed = {name for key, field in fields if field.is_required() for name in (key, field.alias)}
        known = {name for key, field in fields for name in (key, field.alias)}
        return {name: each for name, each in value.items() if each is not None or name in needed or name not in known}


class Inner(NamedTuple):
    """A field that holds blocks."""

    name: str
    alias: str
    kind: type[Block]
    is_list: bool


@cache
def inner_blocks(kind: type[Block]) -> tuple[Inner, ...]:
    """The fields of a block that hold blocks, in order."""
    return tuple(
        Inner(name, str(field.alias), found, get_origin(field.annotation) is tuple)
        for name, field in kind.model_fields.items()
        if (found := _find_block(field.annotation))
    )


def _find_block(annotation: Any) -> type[Block] | None:
    """`Block` of `Block | None` or `tuple[Block, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, Block):
        return annotation
    return next(filter(None, map(_find_block, get_args(annotation))), None)
