"""Loads an `OrbitRun` from a file, or finds every problem of the file.

Belongs here: reading, `--set`, `${VAR}`, and collecting findings. Does not belong here: deciding `Auto` (`resolve`).
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from orbit_runtime.errors import ManifestError
from orbit_runtime.spec.block import Contradiction
from orbit_runtime.spec.document import Document, parse_document, parse_value
from orbit_runtime.spec.fields import find_schema, format_path, is_block, is_free
from orbit_runtime.spec.problems import build_problem, explain, find_elsewhere, find_near
from orbit_runtime.spec.run import COLLECTING, OrbitRun, find_contradictions

FieldPath = tuple[str | int, ...]

MAX_BYTES = 1 << 20
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(:-([^}]*))?\}")
_ECHOES = ("default_factory_not_called", "contradiction")
"""Kinds of errors that pydantic adds to another finding, or that are collected here."""


def load_manifest(
    path: str | Path, overrides: Sequence[str] = (), *, environ: Mapping[str, str] | None = None
) -> OrbitRun:
    """The run that a file describes.

    Args:
        overrides: `path=value`, as given to `--set`.
        environ: what `${VAR}` in a URI is looked up in; the process's own environment unless given.

    Raises:
        ManifestError: with every problem of the file and of the overrides in `problems`.
    """
    return parse_manifest(_read(Path(path)), name=str(path), overrides=overrides, environ=environ)


def parse_manifest(
    text: str, *, name: str, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> OrbitRun:
    """Loads a manifest from text, like `load_manifest`; `name` stands for the file in messages."""
    document = parse_document(text, name)
    given, problems = apply_overrides(document.value, overrides)
    # What --set replaces is no longer a problem of the file.
    broken = {path for path in document.broken if not _inside(path, given)}
    problems += [each for each in document.problems if not _replaced(each, given)]
    variables = os.environ if environ is None else environ
    findings = [*_expand_uris(document.value, variables), *_validate(document.value, broken)]
    if not findings and not problems:
        _newest[:] = [(document, name, given)]
        return OrbitRun.model_validate(document.value, by_name=False)
    for path, message, fix in findings:
        if path not in broken:
            problems.append(build_problem(path, message, fix, name=name, lines=document.lines, given=given))
    raise _gather(problems, name)


_newest: list[tuple[Document, str, Mapping[FieldPath, str]]] = []
"""The manifest that this process loaded last."""


def find_place(field: str) -> str:
    """Place of a field in the manifest that this process loaded last, for a mistake that was found afterwards:
    `run.yaml:12: spec.environment.rewards[correct]`."""
    if not _newest:
        return field
    document, name, given = _newest[0]
    value, path = document.value, FieldPath()
    for part in re.findall(r"[^.\[\]']+", field):
        items: list[Any] = value if isinstance(value, list) else []
        named = [(str(at), isinstance(each, dict) and each.get("name")) for at, each in enumerate(items)]
        path = (*path, next((at for at, names in enumerate(named) if part in names), part))
        value = value[path[-1]] if path in document.lines else None
    place = build_problem(path, "", None, name=name, lines=document.lines, given=given).where or ""
    return f"{place.rpartition(': ')[0]}: {field}"


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ManifestError(
            "there is no such file", where=str(path), fix="check the path; `orbit init` writes a manifest to start from"
        ) from None
    except IsADirectoryError:
        raise ManifestError("this is a folder", where=str(path), fix="name the manifest in it") from None
    except OSError as error:
        raise ManifestError(
            f"the file cannot be read: {error.strerror or error}", where=str(path), fix="check its permissions"
        ) from None
    if len(raw) > MAX_BYTES:
        raise ManifestError("the file is larger than 1 MiB", where=str(path), fix="is this the manifest?")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ManifestError(
            f"not UTF-8 text (byte 0x{raw[error.start]:02x})", where=f"{path}:{line}", fix="save the file as UTF-8"
        ) from None
    return text


def _gather(problems: list[ManifestError], name: str) -> ManifestError:
    def place(problem: ManifestError) -> tuple[int, str]:
        match = re.match(re.escape(name) + r":(\d+)", problem.where or "")
        return (int(match[1]) if match else 0, problem.where or "")

    ordered = tuple(sorted(problems, key=place))
    count = "1 problem" if len(ordered) == 1 else f"{len(ordered)} problems"
    return ManifestError(f"{count} in the manifest", where=name, problems=ordered)


def _inside(path: FieldPath, given: Mapping[FieldPath, str]) -> bool:
    return any(path[: len(each)] == each for each in given)


def _replaced(problem: ManifestError, given: Mapping[FieldPath, str]) -> bool:
    return any((problem.where or "").endswith(f": {format_path(path)}") for path in given)


def _expand_uris(value: Any, environ: Mapping[str, str]) -> Iterator[tuple[FieldPath, str, str]]:
    """Replaces `${VAR}` and `${VAR:-default}` in every URI, in place."""
    for block, path in list(_uris(value)):
        text = block["uri"]
        for match in _VARIABLE.finditer(text):
            if match[1] not in environ and match[3] is None:
                fix = f"set `{match[1]}`, or give a default: `${{{match[1]}:-…}}`"
                yield path, f"the environment variable `{match[1]}` is not set", fix
        block["uri"] = _VARIABLE.sub(lambda match: environ.get(match[1]) or match[3] or "", text)
        if "${" in block["uri"]:
            yield (
                path,
                f"`{block['uri']}` holds a `${{` that names no variable",
                "write `${NAME}` or `${NAME:-default}`",
            )


def _uris(value: Any, path: FieldPath = ()) -> Iterator[tuple[dict[str, Any], FieldPath]]:
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        here = (*path, key)
        if key == "uri" and isinstance(child, str) and find_schema(here):
            yield value, here
        else:
            yield from _uris(child, here)


def _validate(value: Any, broken: set[FieldPath]) -> Iterator[tuple[FieldPath, str, str | None]]:
    """Every finding: of single fields first, then of fields that contradict each other."""
    try:
        OrbitRun.model_validate(value, by_name=False)
        return
    except ValidationError as error:
        found = [each for each in error.errors(include_url=False) if not _is_echo(each)]
    places = [_place(each["loc"]) for each in found]
    for place, each in zip(places, found, strict=True):
        yield (place, *explain(each["type"], place, each["input"]))
    wrong = {*broken, *places}
    for contradiction in _find_contradictions(value, wrong):
        if not any(_touches(path, wrong) for path in contradiction.involves):
            yield contradiction.at, contradiction.message, contradiction.fix


def _place(loc: FieldPath) -> FieldPath:
    """Inside a mapping of the user's own, pydantic mixes the names of kinds into the path: it ends at the first key."""
    for length in range(len(loc)):
        if is_free(find_schema(loc[:length]) or {}):
            return loc[: length + 1]
    return loc


def _is_echo(error: Any) -> bool:
    """A list is also called too short where its items are wrong."""
    short = error["type"] == "too_short" and len(error["input"]) >= error["ctx"]["min_length"]
    return short or error["type"] in _ECHOES


def _find_contradictions(value: Any, wrong: set[FieldPath]) -> list[Contradiction]:
    """Contradictions of the file as if its wrong fields stood at their defaults.

    pydantic looks for them only in a file without other errors; the reader wants all findings at once.
    """
    repaired = copy.deepcopy(value)
    for path in sorted(wrong, key=len, reverse=True):
        _repair(repaired, path)
    try:
        run = OrbitRun.model_validate(repaired, by_name=False, context=COLLECTING)
    except ValidationError:
        return []
    return list(find_contradictions(run))


def _repair(value: Any, path: FieldPath) -> None:
    """Puts an example where one is needed, and nothing elsewhere."""
    here: Any = value
    for part in path[:-1]:
        if not _holds(here, part):
            return
        here = here[part]
    last, parent = path[-1], find_schema(path[:-1]) or {}
    example = _example(find_schema(path) or {}, required=last in parent.get("required", []))
    if example is not None or isinstance(here, list):
        here[last] = example
    elif isinstance(here, dict):
        here.pop(last, None)


def _holds(block: Any, part: str | int) -> bool:
    return isinstance(block, list) or (isinstance(block, dict) and part in block)


def _example(schema: dict[str, Any], *, required: bool) -> Any:
    """A value that is allowed where one is needed; `None` where the field can be left out."""
    if not required:
        return None
    if is_block(schema):
        return {name: _example(schema["properties"][name], required=True) for name in schema.get("required", [])}
    return copy.deepcopy(schema["examples"][0]) if "examples" in schema else None


def _touches(path: FieldPath, wrong: set[FieldPath]) -> bool:
    return any(path[: len(each)] == each[: len(path)] for each in wrong)


_TOP = ("apiVersion", "kind", "metadata", "spec")
_PART = re.compile(r"([^.\[\]]+)((?:\[[0-9]+\])*)")


def apply_overrides(value: Any, overrides: Sequence[str]) -> tuple[dict[FieldPath, str], list[ManifestError]]:
    """Puts each override into `value`, in order.

    Returns:
        the places that were set with the override of each, and what is wrong with the others.
    """
    given: dict[FieldPath, str] = {}
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


def parse_path(text: str, where: str) -> FieldPath:
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
    path: FieldPath = ()
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


def _unknown(path: FieldPath, part: str, where: str) -> ManifestError:
    known = list((find_schema(path) or {}).get("properties", {}))
    inside = f"`{format_path(path)}`" if path else "the manifest"
    if not known:
        return ManifestError(f"{inside} has no fields", where=where, fix="set it as a whole, e.g. to `{a: 1}`")
    near = find_near(part, known)
    meant = format_path((*path, near)) if near else find_elsewhere(part)
    fix = f"did you mean `{meant}`?" if meant else f"its fields: {', '.join(known)}"
    return ManifestError(f"{inside} has no field `{part}`", where=where, fix=fix)


def _put(value: Any, path: FieldPath, new: Any, where: str) -> None:
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
