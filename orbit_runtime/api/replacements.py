"""Functions and prompt rows passed from Python in place of those that a manifest names."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from orbit_runtime.api.manifest import load_manifest
from orbit_runtime.errors import DataError, OutputError, UsageError
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage.cache import default_cache
from orbit_runtime.workers.user_code.entrypoints import FROM_PYTHON

Functions = Mapping[str, Callable[..., Any]]


def with_replacements(
    manifest: OrbitRun,
    *,
    rewards: Functions | None,
    loss: Callable[..., Any] | None,
    advantages: Callable[..., Any] | None,
    prompts: Iterable[Mapping[str, Any]] | None,
) -> OrbitRun:
    """The manifest with `FROM_PYTHON` in place of every given function, and with the file of the given rows."""
    changes: dict[str, Any] = {}
    if rewards is not None:
        changes["spec.environment.rewards"] = _rewards(manifest, rewards)
    if loss is not None:
        if manifest.spec.algorithm.type == "SFT":
            message = "demonstrations have a loss of their own: there are no advantages from which to compute another"
            raise UsageError(message, where="loss", fix="leave it out, or choose another algorithm.type")
        changes |= {"spec.algorithm.type": "Custom", "spec.algorithm.entrypoint": FROM_PYTHON}
    if advantages is not None:
        changes["spec.algorithm.advantage"] = {"entrypoint": FROM_PYTHON}
    if prompts is not None:
        columns = manifest.to_manifest()["spec"]["data"]["prompts"][0]
        column = str(columns.get("promptField", "prompt"))
        changes["spec.data.prompts"] = [{**columns, "uri": str(write_rows(prompts, column)), "format": "JSONL"}]
    return load_manifest(manifest, changes)


def _rewards(manifest: OrbitRun, functions: Functions) -> list[dict[str, Any]]:
    """One reward for each function, with weight, arguments and time limit of the manifest's reward of that name."""
    if not isinstance(functions, Mapping) or not functions:
        raise UsageError("no reward is given", where="rewards", fix='give functions by name: {"close": close_number}')
    known = {each["name"]: each for each in manifest.to_manifest()["spec"]["environment"].get("rewards", ())}
    found = []
    for name in functions:
        kept = {key: value for key, value in known.get(name, {"name": name}).items() if key != "type"}
        # Arguments of a shipped reward do not apply to another function.
        if "type" in known.get(name, {}):
            kept.pop("arguments", None)
        found.append({**kept, "entrypoint": FROM_PYTHON})
    return found


def write_rows(rows: Iterable[Mapping[str, Any]], column: str) -> Path:
    """Writes a file in the download cache, named by its content: equal rows are the same prompts, now and on resume.

    Args:
        column: where a row has its prompt.

    Raises:
        DataError: a row is not a mapping of plain values, or has no prompt.
        OutputError: the cache cannot be written.
    """
    lines = []
    for index, row in enumerate(rows):
        where = f"prompts[{index}]"
        if not isinstance(row, Mapping):
            raise DataError(
                f"{type(row).__name__} is not a row", where=where, fix='give a mapping: {"prompt": "12+34="}'
            )
        if column not in row:
            has = ", ".join(repr(name) for name in row) or "nothing"
            fix = f"call the prompt {column!r}, or set spec.data.prompts.0.promptField to its column"
            raise DataError(f"no key {column!r}; the row has: {has}", where=where, fix=fix)
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False, allow_nan=False) + "\n")
        except (TypeError, ValueError) as error:
            raise DataError(f"not plain values: {error}", where=where, fix="give text, numbers, lists") from None
    if not lines:
        raise DataError("there are no prompts", where="prompts", fix="give at least one row")
    data = "".join(lines).encode("utf-8", errors="surrogatepass")
    path = default_cache(os.environ) / "rows" / hashlib.sha256(data).hexdigest() / "prompts.jsonl"
    if not path.exists():
        part = path.with_name(f"{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(data)
            part.replace(path)
        except OSError as error:
            raise OutputError(
                f"the rows cannot be written: {error.strerror}", where=str(path), fix="set ORBIT_CACHE"
            ) from error
    return path
