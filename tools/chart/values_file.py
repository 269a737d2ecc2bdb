"""Reads `values.yaml` as what it is for people: sections, keys, comments, defaults.

Belongs here: the reading, and complaints about what is not documented. Does not belong here: pages made from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML

_KEY = re.compile(r"^( *)([A-Za-z][A-Za-z0-9]*):(?: |$)")
_COMMENT = re.compile(r"^ *# (.*)$")
_SECTION = "## "


@dataclass(frozen=True, slots=True)
class Value:
    """One documented key. Example: `Value("image.tag", "Tag; empty means …", "", "Images")`."""

    path: str
    text: str
    default: Any
    section: str


def read_values(source: str) -> list[Value]:
    """Every documented key in the file's order.

    A comment above a key documents it and all below it; a key without one must hold only documented ones.

    Raises:
        ValueError: a key is not documented.
    """
    defaults = YAML(typ="safe").load(source)
    found: list[Value] = []
    section = ""
    comment: list[str] = []
    parents: list[str] = []
    for number, line in enumerate(source.splitlines(), start=1):
        said = _COMMENT.match(line)
        if said:
            if said[1].startswith(_SECTION):
                section = said[1].removeprefix(_SECTION)
            else:
                comment.append(said[1])
            continue
        key = _KEY.match(line)
        if key is None:
            comment = []
            continue
        parents = [*parents[: len(key[1]) // 2], key[2]]
        path = ".".join(parents)
        if comment:
            found.append(Value(path, " ".join(comment), _at(defaults, parents), section))
        elif not _is_covered(path, found) and not isinstance(_at(defaults, parents), Mapping):
            raise ValueError(f"values.yaml:{number}: {path} has no comment")
        comment = []
    return found


def leaves(defaults: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Paths of all keys that hold no further keys."""
    for name, value in defaults.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _is_covered(path: str, found: list[Value]) -> bool:
    return any(path.startswith(f"{value.path}.") for value in found)


def _at(defaults: Mapping[str, Any], keys: list[str]) -> Any:
    node: Any = defaults
    for key in keys:
        node = node[key]
    return node
