"""Loads a manifest from a file, a mapping, or another manifest, with overrides from Python."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orbit_runtime.errors import UsageError
from orbit_runtime.spec import OrbitRun, parse_manifest
from orbit_runtime.spec import load_manifest as load_file


def load_manifest(
    source: str | Path | Mapping[str, Any] | OrbitRun, overrides: Mapping[str, Any] | None = None
) -> OrbitRun:
    """Loads and checks a whole manifest; nothing that it names is opened.

    Args:
        source: a YAML or JSON file, the same as a mapping, or a manifest to change. Relative paths in a file start in
            its folder, others in the working folder.
        overrides: field path → value, as for `--set`: `{"spec.training.steps": 8}`.

    Raises:
        ManifestError: with all findings, not only the first, in `problems`.
        UsageError: an argument has another type.
    """
    if not isinstance(overrides, Mapping | None):
        raise UsageError(
            f"{type(overrides).__name__} is not a mapping",
            where="overrides",
            fix='give values by path, such as {"spec.training.steps": 8}',
        )
    given = [f"{path}={_as_json(value, path)}" for path, value in (overrides or {}).items()]
    if isinstance(source, OrbitRun):
        if not given:
            return source
        changed = parse_manifest(
            _as_json(source.model_dump(mode="json", by_alias=True, exclude_unset=True), source.name),
            name=source.name,
            overrides=given,
        )
        return changed.beside(source.folder)
    if isinstance(source, Mapping):
        return parse_manifest(_as_json(source, "manifest"), name="manifest", overrides=given)
    if isinstance(source, str | Path):
        return load_file(source, given).beside(Path(source).resolve().parent)
    raise UsageError(
        f"{type(source).__name__} is not a manifest", where="manifest", fix="give a file, a mapping or an OrbitRun"
    )


def _as_json(value: Any, where: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"this cannot be part of a manifest: {error}", where=where, fix="give plain values") from None
