"""Reading a model folder's JSON files, with the file and the line where one is broken.

Belongs here: bytes → an object, or one clear error. Does not belong here: what the values mean.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orbit_runtime.errors import ModelError

DAMAGED = "correct it, or copy or download the file again"


def load_settings(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelError: naming file and line; `FileNotFoundError` is the caller's to judge.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
        content = json.loads(text)
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ModelError("not UTF-8", where=f"{path}:{line}", fix=DAMAGED) from None
    except json.JSONDecodeError as error:
        what = "the file is empty" if not text.strip() else f"not JSON: {error.msg} (column {error.colno})"
        raise ModelError(what, where=f"{path}:{error.lineno}", fix=DAMAGED) from None
    except (IsADirectoryError, PermissionError) as error:
        raise ModelError(f"the file cannot be read: {error.strerror}", where=str(path)) from None
    if not isinstance(content, dict):
        raise ModelError("not a JSON object", where=str(path), fix=DAMAGED)
    return content
