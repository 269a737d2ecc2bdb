"""Memory that ran out while a run computed: in which stage, and what of the manifest takes less there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from orbit_runtime.errors import OutOfMemoryError, is_out_of_memory
from orbit_runtime.loop.show import Show

FIELDS = {
    "preflight": (
        "spec.model.maxSequenceLength",
        "lower it, or sampling.maxNewTokens: both sides first compute the longest sequence that there can be",
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
    """Raises OutOfMemoryError (79) in place of torch's or Python's own error, with the stage of the run."""
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
