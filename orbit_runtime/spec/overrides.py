"""`--set path=value`: single fields from the command line, which override the file's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from orbit_runtime.errors import ManifestError
from orbit_runtime.spec.document import parse_value
from orbit_runtime.spec.fields import find_schema, format_path
from orbit_runtime.spec.problems import find_elsewhere, find_near

Path = tuple[str | int, ...]

_TOP = ("apiVersion", "kind", "metadata", "spec")
_PART = re.compile(r"([^.\[\]]+)((?:\[[0-9]+\])*)")


def apply_overrides(value: Any, overrides: Sequence[str]) -> tuple[dict[Path, str], list[ManifestError]]:
    """Puts each override into `value`, in order.

    Returns:
        the places that were set with the override of each, and what is wrong with the others.
    """
    given: dict[Path, str] = {}
    problems: list[ManifestError] = []
    for override in overrides:
        name, equals, text = override.partition("=")
        where = f"--set {override}"
        try:
            if not equals or not name.strip():
                raise ManifestError("this is not `path=value`", where=where, fix="write e.g. `--set training.steps=5`")
            path = parse_path(name.strip(), where)
            _put(value, path, parse_value(text.strip(), where), where)
            given[path] = override
        except ManifestError as problem:
            problems.append(problem)
    return given, problems


def parse_path(text: str, where: str) -> Path:
    """`spec.data.prompts[0].uri`, `data.prompts.0.uri` → `("spec", "data", "prompts", 0, "uri")`; the field must exist.

    Raises:
        ManifestError: there is no such field.
    """
    parts: list[str | int] = []
    for piece in re.split(r"\.(?![^\[]*\])", text):
        match = _PART.fullmatch(piece)
        if match is None:
            raise ManifestError(f"`{text}` is not a path", where=where, fix="write names with dots: `training.steps`")
        parts += [match[1], *(int(index) for index in re.findall(r"[0-9]+", match[2]))]
    if parts[0] not in _TOP:
        parts.insert(0, "spec")
    path: Path = ()
    for part in parts:
        schema = find_schema(path) or {}
        if schema.get("type") == "array":
            if not str(part).isdigit():
                raise ManifestError(
                    f"`{format_path(path)}` is a list", where=where, fix=f"name the item: `{format_path(path)}[0]`"
                )
            part = int(part)
        here = (*path, part)
        if find_schema(here) is None:
            raise _unknown(path, str(part), where)
        path = here
    return path


def _unknown(path: Path, part: str, where: str) -> ManifestError:
    known = list((find_schema(path) or {}).get("properties", {}))
    inside = f"`{format_path(path)}`" if path else "the manifest"
    if not known:
        return ManifestError(f"{inside} has no fields", where=where, fix="set it as a whole, e.g. to `{a: 1}`")
    near = find_near(part, known)
    meant = format_path((*path, near)) if near else find_elsewhere(part)
    fix = f"did you mean `{meant}`?" if meant else f"its fields: {', '.join(known)}"
    return ManifestError(f"{inside} has no field `{part}`", where=where, fix=fix)


def _put(value: Any, path: Path, new: Any, where: str) -> None:
    """Blocks that the file left out are made; list items are not."""
    here = value
    for index, part in enumerate(path):
        last = index == len(path) - 1
        if isinstance(here, list):
            if not isinstance(part, int) or part >= len(here):
                raise ManifestError(
                    f"`{format_path(path[:index])}` has {len(here)} items, and their count starts at 0",
                    where=where,
                    fix=f"set the whole list: `{format_path(path[:index])}=[…]`",
                )
        elif isinstance(here, dict):
            if not last and here.get(str(part)) is None:
                here[part] = [] if isinstance(path[index + 1], int) else {}
        else:
            raise ManifestError(
                f"`{format_path(path[:index])}` is not a block in the file", where=where, fix="correct it there first"
            )
        if last:
            here[part] = new
        else:
            here = here[part]
