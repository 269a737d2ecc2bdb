"""The kill test, shared by the local folder and the object store."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from typing import Any

from orbit_runtime.observability.metrics import TIME_FIELDS
from orbit_runtime.storage import Store, open_store
from tests.integration.run_nursery import Nursery


def small_manifest(*, steps: int, adapter: str = "LoRA", every_steps: int = 1, seed: int = 0) -> dict[str, Any]:
    return {
        "apiVersion": "orbitrl.dev/v1alpha1",
        "kind": "OrbitRun",
        "metadata": {"name": "small"},
        "spec": {
            "model": {"uri": "builtin://tiny-adder", "precision": "INT4"},
            "adapter": {"type": adapter},
            "algorithm": {"groupSize": 4},
            "data": {"prompts": [{"uri": "builtin://two-digit-addition"}], "seed": seed},
            "environment": {"rewards": [{"name": "correct", "type": "ExactMatch"}]},
            "rollout": {"sampling": {"maxNewTokens": 4}},
            "training": {"steps": steps, "promptsPerStep": 4, "learningRate": 1e-3, "miniBatchPrompts": 2},
            "checkpoint": {"everySteps": every_steps},
            "observability": {"metricsPort": -1},
        },
    }


def timeless_rows(store: Store) -> list[dict[str, Any]]:
    """`metrics.jsonl` without the fields that no two runs share."""
    rows = [json.loads(line) for line in store.get("metrics.jsonl").decode().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIME_FIELDS} for row in rows]


def kill_until_done(
    nursery: Nursery, manifest: dict[str, Any], out: str, *, kills: int, seed: int, longest: float
) -> list[float]:
    """Starts the run, kills it at a random moment after it claimed the folder, `kills` times; then lets it finish.

    Returns the delays. They count from the claim, so that a busy machine's slow starts do not eat them up.
    """
    rng = random.Random(seed)
    delays: list[float] = []
    store = open_store(out)
    while len(delays) < kills:
        pid = nursery.start(manifest, out)
        while not store.exists(f"executions/{len(delays) + 1:06}.json"):
            time.sleep(0.01)
        delay = rng.uniform(0, longest)
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
        code = nursery.wait()
        assert code == -signal.SIGKILL, f"the run ended with {code} before it could be killed: give it more steps"
        delays.append(delay)
    assert nursery.run(manifest, out) == 0
    return delays
