"""What every block of the manifest has in common.

Belongs here: the base class of a block, the three sets that a field can be in, and shared kinds of text.
Does not belong here: any field of the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, Strict
from pydantic.alias_generators import to_camel

FieldSet = Literal["identity", "layout", "display"]

IDENTITY: Any = Field(json_schema_extra={"orbitSet": "identity"})
"""Changes the maths: a checkpoint of another identity is refused."""
LAYOUT: Any = Field(json_schema_extra={"orbitSet": "layout"})
"""Changes where and how it is computed, not what: may change on resume."""
DISPLAY: Any = Field(json_schema_extra={"orbitSet": "display"})
"""Changes how long the run is and what is kept and shown of it: may change on resume."""

Uri = Annotated[str, Field(min_length=1, max_length=1024)]
AsTuple = Strict(False)
"""A list in the file becomes a tuple here; its items stay strict."""


class Contradiction(NamedTuple):
    """Fields that are each allowed and impossible together. Paths are relative to the block that found it."""

    at: tuple[str | int, ...]
    """The field to blame, e.g. `("oft",)`."""
    involves: tuple[tuple[str | int, ...], ...]
    """Every other field that the finding rests on: where one of them is itself wrong, nothing is said."""
    message: str
    fix: str


def check_scheme(name: str, uri: str, schemes: tuple[str, ...]) -> Iterator[Contradiction]:
    """A URI that nothing here opens."""
    scheme, separator, rest = uri.partition("://")
    allowed = ", ".join(["a path", *(f"`{each}://`" for each in schemes)])
    if separator and scheme not in schemes:
        near = get_close_matches(scheme, schemes, n=1)
        fix = f"did you mean `{near[0]}://`? allowed: {allowed}" if near else f"allowed: {allowed}"
        yield Contradiction((name,), (), f"`{uri}` is not something Orbit can open here", fix)
    elif scheme == "file" and separator and not rest.startswith("/"):
        yield Contradiction((name,), (), f"`{uri}` does not hold an absolute path", f"write the path alone: `{rest}`")
    elif separator and not rest.strip("/") and scheme != "file":
        yield Contradiction((name,), (), f"`{uri}` names nothing after `{scheme}://`", "write its name")


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

    def contradictions(self) -> Iterator[Contradiction]:
        """What is impossible within this block, its children not included."""
        yield from ()
