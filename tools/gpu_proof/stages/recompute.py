"""A training pass that keeps activations, and one that computes them again: time, memory, and the same adapter."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import get_args

from benchmarks.rl_step_vs_trl import Shape, Turns, orbit_turn
from orbit_runtime.spec.training import Training
from tools.gpu_proof.random_model import build_random_model
from tools.gpu_proof.record import Record, WrongResult
from tools.gpu_proof.stages.rl_step import SHAPE, TINY, PeakMemory, median, release

FIELD = "recompute"


def run(record: Record) -> None:
    values = [value for value in get_args(Training.model_fields[FIELD].annotation) if value != "Auto"]
    shape: Shape = replace(TINY if record.is_tiny else SHAPE, precision="INT4")
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        folder = build_random_model(scratch / "model", "INT4", device=record.device, tiny=record.is_tiny)
        adapters = {}
        for value in values:
            memory, turns = PeakMemory(), Turns()
            orbit_turn(shape, folder, scratch / f"run-{value}", training={FIELD: value}, progress=memory)(turns)
            release()
            record.add(f"{FIELD}: {value}", {
                "seconds of training": median(turns, "seconds_train"),
                "most bytes while training": memory.bytes.get("train"),
                "loss": [row["loss"] for row in turns.rows],
                "adapter": turns.rows[-1]["adapter_digest"],
            })  # fmt: skip
            adapters[value] = turns.rows[-1]["adapter_digest"]
    if len({*adapters.values()}) != 1:
        raise WrongResult(f"the adapter depends on what is computed again: {adapters}")
