"""What a run says as it ends, to whoever looks after its process: one line of JSON in a file that is named to it.

Belongs here: that file. Does not belong here: what `/status` says, by the same names, while the run lives (`status`).

Kubernetes keeps a few kB of this file in the pod's status (its termination message), after the pod's log and port are
gone. So an operator learns how far a run came that ended between two questions.
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
"""Characters of one text; three long ones and all numbers stay within the limit, whatever the alphabet."""


def add_last_words(facts: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> None:
    """Adds facts to those that are there already. Does nothing where no file was named, or it cannot be written.

    Args:
        facts: texts and numbers by name; None takes a fact away.
        environ: what names the file; the process's own environment unless given.
    """
    name = (os.environ if environ is None else environ).get(FILE_VARIABLE)
    if not name:
        return
    path = Path(name)
    with contextlib.suppress(OSError):
        # The file is a mount of its own: it can be filled anew, and not replaced.
        path.write_bytes(_shorten({**_load(path), **facts}))


def words_of(error: OrbitError) -> dict[str, Any]:
    """An error as facts. Of a manifest every finding is named, as far as there is room."""
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
    """Without what is not known; texts are cut until everything fits."""
    longest = LONGEST_TEXT
    while True:
        cut = {name: _cut(value, longest) for name, value in facts.items() if value is not None}
        # A file's name, which errors quote, need not be UTF-8: then it holds halves of characters.
        line = json.dumps(cut, ensure_ascii=False).encode("utf-8", "replace")
        if len(line) <= LARGEST:
            return line
        longest //= 2


def _cut(value: Any, longest: int) -> Any:
    return value[: longest - 1] + "…" if isinstance(value, str) and len(value) > longest else value
