"""`python -m orbit_runtime.storage.delete URI`: deletes a whole run folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from orbit_runtime.errors import EXIT_DONE, InternalError, OrbitError, OutputError, UsageError
from orbit_runtime.storage.opening import open_store
from orbit_runtime.storage.store import Store

MARKS = ("run.json", "executions/")
"""Every run folder has one of these from its first second."""


def delete_run(store: Store) -> int:
    """Deletes every object of a run folder, those that identify it last; returns the number of objects.

    Raises:
        OutputError: the folder is not empty and not a run folder.
    """
    keys = store.list()
    marks = [key for key in keys if key.startswith(MARKS)]
    if keys and not marks:
        raise OutputError(
            "this is not a run folder: it has neither run.json nor executions/",
            where=store.uri,
            fix="nothing was deleted; check spec.storage.uri",
        )
    # If interrupted and started again, it must still recognise what is left.
    store.delete([key for key in keys if not key.startswith(MARKS)])
    store.delete(marks)
    return len(keys)


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    try:
        if len(arguments) != 1:
            raise UsageError("exactly one URI is expected", fix="python -m orbit_runtime.storage.delete URI")
        count = delete_run(open_store(arguments[0]))
    except OrbitError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return InternalError.exit_code
    print(f"{count} objects deleted in {arguments[0]}")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
