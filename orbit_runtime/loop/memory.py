"""Running out of memory: the error names the stage of the run, and the manifest field that reduces its memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from orbit_runtime.errors import OutOfMemoryError, is_out_of_memory
from orbit_runtime.loop.show import Show

FIELDS = {
    "preflight": (
        "spec.model.maxSequenceLength",
        "lower it, or sampling.maxNewTokens: both sides first compute the longest possible sequence",
    ),
    "collect": ("spec.rollout.maxRunningRequests", "lower it, or sampling.maxNewTokens"),
    "train": (
        "spec.training.microBatchTokens",
        "lower it: gradients are summed over more and smaller micro-batches; or write training.recompute: PerLayer",
    ),
}
OTHERS = ("spec.model.uri", "`orbit plan` shows what each phase takes; choose a smaller model or more memory")


@contextmanager
def told_where_memory_ran_out(show: Show) -> Iterator[None]:
    """Replaces torch's or Python's error by OutOfMemoryError (79), which names the stage of the run."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        where, fix = FIELDS.get(show.current, OTHERS)
        said = str(error).strip().splitlines()
        raise OutOfMemoryError(
            f"memory ran out in stage {show.current}: {said[0][:300] if said else type(error).__name__}",
            where=where,
            fix=fix,
        ) from error
