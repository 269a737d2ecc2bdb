"""The first run of every user, on the device: it learns, and proves every publish.

Does not belong here: what a run does (`orbit_runtime.loop`).
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.harness import ROOT
from orbit_runtime.loop import run as train
from orbit_runtime.observability.progress import build_progress
from orbit_runtime.spec import load_manifest
from tools.gpu_proof.record import Record, WrongResult

MANIFEST = ROOT / "examples" / "quickstart.yaml"
ENDS = 5
"""Steps at the beginning and at the end whose mean rewards are compared."""
RISE = 0.3
TINY = ("training.steps=2", "training.promptsPerStep=2")


def run(record: Record) -> None:
    spec = load_manifest(MANIFEST, [*(TINY if record.is_tiny else ()), "observability.metricsPort=-1"])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        result = train(spec, out=str(out), progress=build_progress(spec.name), manifest_folder=MANIFEST.parent)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        device = json.loads((out / "run.json").read_text())["device"]
    rewards = [row["reward_mean"] for row in rows]
    first, last = statistics.mean(rewards[:ENDS]), statistics.mean(rewards[-ENDS:])
    record.add("device", device)
    record.add("reward", {"first steps": first, "last steps": last, "of each step": rewards})
    record.add("seconds of a step", {
        name: statistics.median(row[name] for row in rows)
        for name, first_value in rows[0].items() if name.startswith("seconds_") and first_value is not None
    })  # fmt: skip
    report = result.report
    record.add("publishes", {"all": report["publishes"], "proven": report["publishes_proven"]})
    record.add("parity", {name: rows[-1][name] for name in rows[-1] if name.startswith("parity_")})
    if device != record.device:
        raise WrongResult(f"the run was on {device}")
    if report["publishes_proven"] != report["publishes"]:
        raise WrongResult(f"{report['publishes_proven']} of {report['publishes']} publishes were proven")
    if report["base_digest_before"] != report["base_digest_after"]:
        raise WrongResult("the base is not the one it started on")
    if not record.is_tiny and last - first < RISE:
        raise WrongResult(f"the reward went from {first:.2f} to {last:.2f}")
