"""The final report of a run to the supervisor of its process: one line of JSON in a file given by name.

Kubernetes keeps a few kB of this file in the pod's status (its termination message), after the pod's log and port are
gone. From it, the operator learns how far a run came that ended between two polls.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orbit_runtime.errors import ManifestError, OrbitError

FILE_VARIABLE = "ORBIT_TERMINATION_FILE"
LARGEST = 4096
"""Bytes that the kubelet keeps of the file."""
LONGEST_TEXT = 800
"""Characters of one text: three long texts and all numbers stay within the limit in any alphabet."""


def add_last_words(facts: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> None:
    """Adds facts to existing ones. Does nothing if no file was named or it cannot be written.

    Args:
        facts: texts and numbers by name; None removes a fact.
        environ: names the file; the process's own environment by default.
    """
    name = (os.environ if environ is None else environ).get(FILE_VARIABLE)
    if not name:
        return
    path = Path(name)
    with contextlib.suppress(OSError):
        # The file is itself a mount: it can be rewritten but not replaced.
        path.write_bytes(_shorten({**_load(path), **facts}))


def build_message(error: OrbitError) -> dict[str, Any]:
    """An error as facts. For a manifest, every finding is named, as far as there is room."""
    facts = {**error.to_json(), "problems": None}
    if isinstance(error, ManifestError) and error.problems:
        found = "; ".join(f"{each.where}: {each.message}" if each.where else each.message for each in error.problems)
        facts["message"] = f"{error.message}: {found}"
    return facts


def _load(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _shorten(facts: Mapping[str, Any]) -> bytes:
    """Drops unknown facts, and cuts texts until everything fits."""
    longest = LONGEST_TEXT
    while True:
        cut = {name: _cut(value, longest) for name, value in facts.items() if value is not None}
        # Errors quote file names, which need not be UTF-8 and then contain lone surrogates.
        line = json.dumps(cut, ensure_ascii=False).encode("utf-8", "replace")
        if len(line) <= LARGEST:
            return line
        longest //= 2


def _cut(value: Any, longest: int) -> Any:
    return value[: longest - 1] + "…" if isinstance(value, str) and len(value) > longest else value
