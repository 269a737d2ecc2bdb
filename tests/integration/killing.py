"""The kill test, shared by the local folder and the object store."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

from orbit_runtime.observability.metrics import TIME_FIELDS
from orbit_runtime.storage import Store, open_store
from tests.integration.run_launcher import RunLauncher


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


def _demanding(adapter: dict[str, Any], precision: str, compute: str = "Auto", **algorithm: Any) -> dict[str, Any]:
    manifest = small_manifest(steps=1)
    spec = manifest["spec"]
    spec["model"] |= {"precision": precision, "computePrecision": compute}
    spec["adapter"] = adapter
    # 96 samples a micro-batch: below 256 targets torch adds them in one thread, and no order can be lost.
    spec["algorithm"] |= {"groupSize": 32, **algorithm}
    if adapter.get("lora", {}).get("dropout"):
        # Trainer and engine differ by what it leaves out.
        spec["parity"] = {"preflight": "Report"}
    spec["training"] |= {"promptsPerStep": 3, "miniBatchPrompts": 3, "updateEpochs": 2}
    return manifest


DEMANDING = {
    "LoRA with dropout": _demanding({"type": "LoRA", "lora": {"dropout": 0.1}}, "INT4"),
    "OFT on NVFP4, its own teacher": _demanding(
        {"type": "OFT"}, "NVFP4", teacher={"type": "Average", "decay": 0.9, "coefficient": 0.1}
    ),
    "MXFP4, PPO with KL": _demanding({"type": "LoRA"}, "MXFP4", type="PPO", kl={"coefficient": 0.1}),
    "LoRA in BF16": _demanding({"type": "LoRA"}, "BF16", "BF16"),
}
"""Runs with more that could go another way the second time: two updates a step, each with work for two threads."""


def demanding_manifest(name: str, *, steps: int, every_steps: int = 1) -> dict[str, Any]:
    manifest = copy.deepcopy(DEMANDING[name])
    manifest["spec"]["training"]["steps"] = steps
    manifest["spec"]["checkpoint"]["everySteps"] = every_steps
    return manifest


def adapter_digests(store: Store) -> list[str]:
    """Digest of the adapter after each step."""
    return [str(row["adapter_digest"]) for row in timeless_rows(store)]


def timeless_rows(store: Store) -> list[dict[str, Any]]:
    """`metrics.jsonl` without the fields that no two runs share."""
    rows = [json.loads(line) for line in store.get("metrics.jsonl").decode().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIME_FIELDS} for row in rows]


def kill_until_done(
    launcher: RunLauncher, manifest: dict[str, Any], out: str, *, kills: int, seed: int, alone: float
) -> None:
    """Starts the run, kills it `kills` times, then lets it finish.

    Every other execution dies at a random moment after it claimed the folder, mostly while it starts; the others die
    at a random moment after they saved a checkpoint of their own, so that progress and loss do not depend on how busy
    the machine is. `alone`: seconds an undisturbed run takes.
    """
    rng = random.Random(seed)
    store = open_store(out)
    for execution in range(1, kills + 1):
        known = _checkpoints(store)
        pid = launcher.start(manifest, out)
        _wait_for(store.exists, f"executions/{execution:06}.json")
        if execution % 2:
            time.sleep(rng.uniform(0, alone / 12))
        else:
            _wait_for(lambda before: _checkpoints(store) - before, known)
            time.sleep(rng.uniform(0, alone / 30))
        os.kill(pid, signal.SIGKILL)
        code = launcher.wait()
        assert code == -signal.SIGKILL, f"the run ended with {code} before it could be killed: give it more steps"
    assert launcher.run(manifest, out) == 0


def check_same_run(killed: Store, alone: Store, *, kills: int, steps: int) -> None:
    """The run that was killed has the rows, rollouts and adapter of the one that was left alone, bit for bit."""
    assert timeless_rows(killed) == timeless_rows(alone)
    report, expected = (json.loads(store.get("report.json")) for store in (killed, alone))
    assert report["adapter_digest"] == expected["adapter_digest"]
    assert report["base_digest_before"] == report["base_digest_after"] == expected["base_digest_before"]
    assert report["publishes"] == report["publishes_proven"] > steps
    assert report["executions"] == kills + 1
    assert kills // 2 <= report["resumed"] <= kills, "an execution that saved after another had saved resumed from it"
    for step in (1, steps // 2, steps):
        name = f"rollouts/step-{step:06d}.jsonl.zst"
        assert killed.get(name) == alone.get(name), "a recorded batch is the same batch"


def _checkpoints(store: Store) -> set[str]:
    return {name for name in store.list("checkpoints/") if name.endswith("/manifest.json")}


def _wait_for[T](happened: Callable[[T], object], of: T, *, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened(of):
        assert time.monotonic() < deadline, f"nothing happened in {seconds} s"
        time.sleep(0.01)
