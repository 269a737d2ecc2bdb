"""Reports stopped episodes, which gave no result within their stage's time limit, once for each step.

Belongs here: the message. Does not belong here: deadlines (`workers`), evidence (`collect`) and its file (`keep`).
"""

from __future__ import annotations

from collections import Counter

from orbit_runtime.loop.collect import MAX_STOPPED, Collected
from orbit_runtime.loop.keep import stopped_name
from orbit_runtime.loop.show import Show


def tell_stopped(show: Show, step: int, collected: Collected) -> None:
    """Names the stages that stopped and the file with the evidence; silent if no episode stopped."""
    if not collected.stopped:
        return
    stages = Counter((each.stage, each.reason) for each in collected.stopped)
    told = "; ".join(f"{stage}: {reason} ({count} times)" for (stage, reason), count in stages.most_common(3))
    which = f"of the first {MAX_STOPPED} " if len(collected.stopped) == MAX_STOPPED else ""
    show.note(
        f"step {step}: episodes stopped and are masked: {told}; stacks and texts {which}are in {stopped_name(step)}"
    )
