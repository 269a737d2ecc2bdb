"""Files of a run folder that every reader of one needs: its rows, gathered into one file, and `run.json`."""

from __future__ import annotations

import json
from typing import Any

from orbit_runtime.errors import OutputError, StorageError
from orbit_runtime.storage.bundles import bundle_order
from orbit_runtime.storage.store import NotFound, Store

RUN_FILE = "run.json"


def compact_rows(store: Store, prefix: str, target: str) -> int:
    """Write `prefix*.json` as JSON lines into `target`, ordered by the numbers in their names; returns the row count.

    It is one put: a reader sees the old file or the new one. The rows stay, so this can be repeated at any time.
    """
    keys = sorted((key for key in store.list(prefix) if key.endswith(".json")), key=bundle_order)
    lines: list[str] = []
    for key, data in zip(keys, store.view_many(keys), strict=True):
        if isinstance(data, NotFound):
            raise data
        try:
            lines.append(json.dumps(dict(json.loads(bytes(data))), separators=(",", ":")))
        except (TypeError, ValueError):
            raise StorageError(
                f"{key} is not JSON", where=store.uri, fix="remove that file; the other rows are unharmed"
            ) from None
    store.put(target, "".join(f"{line}\n" for line in lines).encode())
    return len(lines)


def read_run_file(store: Store) -> dict[str, Any] | None:
    """The folder's `run.json`; `None` if no run was started there.

    Raises:
        OutputError: the file is damaged.
    """
    try:
        found = json.loads(store.get(RUN_FILE))
    except NotFound:
        return None
    except ValueError:
        found = None
    if not isinstance(found, dict) or "resolved" not in found:
        what = "is not JSON" if found is None else "holds no run"
        fix = "restore the file from a copy of the folder, or name another folder"
        raise OutputError(f"{RUN_FILE} {what}: the file is damaged", where=store.uri, fix=fix)
    return found
