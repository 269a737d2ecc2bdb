"""What a run would start, without starting it: for `--dry-run`.

Belongs here: the list of processes with argv and environment. Does not belong here: starting them.
"""

from __future__ import annotations

import sys
from typing import Any

from orbit_runtime.spec import OrbitRun


def describe(run: OrbitRun) -> list[dict[str, Any]]:
    """One entry per process: `name, count, argv, environment`, in the order they would start.

    With the torch trainer and engine everything but the rewards runs in the one process of `orbit run`.
    """
    from orbit_runtime.workers.reward_pool import default_workers

    return [
        {
            "name": "run",
            "count": 1,
            "argv": [sys.executable, "-m", "orbit_runtime.cli.main", "run", "FILE"],
            "environment": {},
            "role": "trainer, engine, loop and status server of run " + run.name,
        },
        {
            "name": "reward-worker",
            "count": default_workers(),
            "argv": [sys.executable, "-m", "orbit_runtime.workers.reward_worker"],
            "environment": {},
            "role": "rewards: " + ", ".join(reward.name for reward in run.spec.environment.rewards),
        },
    ]
