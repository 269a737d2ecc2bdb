"""One check of the API server's in CEL, and the forms that several of them share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from orbit_runtime.spec.hub_address import MODEL_FORM, PROMPTS_FORM, REPOSITORY, REVISION


class Rule(NamedTuple):
    """One of `x-kubernetes-validations`."""

    cel: str
    message: str
    """What to do; the server puts the path and the value before it."""
    field: str = ""
    """The field to blame, relative to the block: `.oft`."""


def uri_rule(schemes: tuple[str, ...], name: str = "uri") -> Rule:
    named = "|".join(scheme for scheme in schemes if scheme != "file")
    return Rule(
        f"!self.{name}.contains('://') || self.{name}.contains('${{')"
        f" || self.{name}.matches('^(file:///|({named})://[/]*[^/])')",
        "allowed: a path, file:///path, " + ", ".join(f"{scheme}://name" for scheme in schemes if scheme != "file"),
        f".{name}",
    )


def _hub_rule(is_address: str, form: str) -> Rule:
    """Args: is_address: CEL, true for an address on a hub of the kind that is needed."""
    # What is no name after `hf://` at all, `uri_rule` refuses.
    others = "!self.uri.matches('^hf://[/]*[^/]') || self.uri.contains('${')"
    return Rule(f"{others} || (({is_address}) && !self.uri.matches('/[.][.](/|$)'))", f"write {form}", ".uri")


_REVISED = f"{REPOSITORY}(@{REVISION})?"
MODEL_ON_HUB = _hub_rule(f"self.uri.matches({f'^hf://{_REVISED}$'!r})", MODEL_FORM)
PROMPTS_ON_HUB = _hub_rule(
    f"self.uri.matches({f'^hf://datasets/{_REVISED}/.+$'!r})"
    f" || (self.uri.matches({f'^hf://{_REVISED}/.+$'!r}) && !self.uri.startsWith('hf://datasets/'))",
    PROMPTS_FORM,
)


def by_type(path: str, defaults: Mapping[str, str | float | None]) -> str:
    """CEL of a field: as it is written, or what its block's type has where it is left out. No default: 0."""
    types: dict[str, list[str]] = {}
    for name, value in defaults.items():
        types.setdefault(f"'{value}'" if isinstance(value, str) else f"{float(value or 0)!r}", []).append(name)
    (*others, (usual, _)) = sorted(types.items(), key=lambda item: len(item[1]))
    cases = "".join(f"self.type in {names!r} ? {value} : " for value, names in others)
    return f"(has(self.{path}) ? self.{path} : {cases}{usual})"
