"""What a run would start, without starting it: for `--dry-run`.

Belongs here: the list of processes with argv and environment. Does not belong here: starting them (`loop`), or torch: a
light install can say it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from orbit_runtime.planner.layout import Layout
from orbit_runtime.spec import OrbitRun


def describe(run: OrbitRun, server_gpus: int | None = None, ranks: Layout | None = None) -> list[dict[str, Any]]:
    """One entry per process: `name, count, argv, environment`, in the order they would start.

    With the torch trainer and engine everything but the rewards runs in the one process of `orbit run`.

    Args:
        server_gpus: of each SGLang server, or its processes on a CPU; None: it is not known before the model is there.
        ranks: how a trainer in several processes divides the model; None: one process trains.
    """
    from orbit_runtime.workers.user_code.reward_pool import default_workers

    is_sft = run.spec.algorithm.type == "SFT"
    does = "loop" if ranks else "trainer, loop" if is_sft else "trainer, engine, loop"
    return [
        {
            "name": "run",
            "count": 1,
            "argv": [sys.executable, "-m", "orbit_runtime.cli.main", "run", "FILE"],
            "environment": {},
            "role": f"{does} and status server of run {run.name}",
        },
        *(_ranks(ranks) if ranks else []),
        # Demonstrations are neither sampled nor scored.
        *([] if is_sft else _of_rollouts(run, server_gpus, ranks, default_workers())),
    ]


def _of_rollouts(
    run: OrbitRun, server_gpus: int | None, ranks: Layout | None, reward_workers: int
) -> list[dict[str, Any]]:
    return [
        *([_sglang(run, server_gpus)] if ranks or run.spec.rollout.engine == "SGLang" else []),
        {
            "name": "reward-worker",
            "count": reward_workers,
            "argv": [sys.executable, "-m", "orbit_runtime.workers.user_code.reward_worker"],
            "environment": {},
            "role": "rewards: " + ", ".join(reward.name for reward in run.spec.environment.rewards),
        },
    ]


def _ranks(layout: Layout) -> list[dict[str, Any]]:
    """In the order of their parents: whoever ends takes with him what is below."""
    python, workers = sys.executable, "orbit_runtime.workers"
    return [
        {
            "name": "rank-guard",
            "count": 1,
            "argv": [python, "-m", f"{workers}.ranks.guard", "..."],
            "environment": {},
            "role": "ends everything below it when the run ends, however it ends",
        },
        {
            "name": "ray-driver",
            "count": 1,
            "argv": [python, "-m", f"{workers}.ranks.driver", "..."],
            "environment": {},
            "role": "a private Ray (GCS and node agent) on the loopback device, for this run alone",
        },
        {
            "name": "trainer-rank",
            "count": layout.num_gpus,
            "argv": ["ray::RankActor"],
            "environment": {
                "RANK": f"0..{layout.num_gpus - 1}", "WORLD_SIZE": str(layout.num_gpus), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "chosen by the system", "CUDA_VISIBLE_DEVICES": "one GPU each; not set on a CPU",
            },
            "role": f"the model in parts, over Megatron-Core: {layout.text()}",
        },
    ]  # fmt: skip


def _sglang(run: OrbitRun, server_gpus: int | None) -> dict[str, Any]:
    """What decides its size; the other arguments follow from the model's files."""
    size = "as many GPUs as replicas leave it" if server_gpus is None else f"a process for each of {server_gpus}"
    python = os.environ.get("ORBIT_SGLANG_PYTHON") or sys.executable
    return {
        "name": "sglang-server",
        "count": run.spec.rollout.replicas,
        "argv": [
            python, "-m", "orbit_runtime.sglang_plugin.launch",
            *([] if server_gpus in (None, 1) else ["--tp-size", str(server_gpus)]), "...",
        ],
        "environment": {"ORBIT_SGLANG": "1"},
        "role": "rollouts; " + ("one process" if server_gpus == 1 else size),
    }  # fmt: skip
