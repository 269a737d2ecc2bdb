"""Gathers rows that were written as one object each into one file.

Belongs here: JSON lines. Does not belong here: the contents of a row (`observability`).
"""

from __future__ import annotations

import json

from orbit_runtime.errors import StorageError
from orbit_runtime.storage.bundles import bundle_order
from orbit_runtime.storage.store import NotFound, Store


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
            lines.append(json.dumps(json.loads(bytes(data)), separators=(",", ":")))
        except ValueError:
            raise StorageError(
                f"{key} is not JSON", where=store.uri, fix="remove that file; the other rows are unharmed"
            ) from None
    store.put(target, "".join(f"{line}\n" for line in lines).encode())
    return len(lines)
