"""A whole RL step of Qwen3-4B's shape on a BF16 and on an INT4 base: its time, and its memory against the plan.

Beside LoRA on the BF16 base, TRL's GRPOTrainer with PEFT does the same steps, where it is installed.

Belongs here: both at one shape. Does not belong here: how either side is driven (`benchmarks.rl_step_vs_trl`).
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import NotMeasured, need_packages
from benchmarks.long_tail import LEARNING_RATE
from benchmarks.rl_step_vs_trl import LORA, Shape, Turns, manifest, orbit_turn, trl_turn
from orbit_runtime.model_info.checkpoint import folder_facts
from orbit_runtime.observability.progress import PlainProgress
from orbit_runtime.planner import Machine, plan
from orbit_runtime.sides.machine import gpu_machine
from tools.gpu_proof.random_model import build_random_model
from tools.gpu_proof.record import Record

ADAPTERS: Mapping[str, Mapping[str, Any]] = {"LoRA": LORA, "OFT": {"type": "OFT", "oft": {"blockSize": 32}}}
SHAPE = Shape("RL step of Qwen3-4B's shape, 8 x 16 x 256 tokens", 8, 256, LEARNING_RATE, "BF16", 2, 1.5, "even", 8)
TINY = replace(SHAPE, name="RL step, 2 x 16 x 4 tokens", prompts=2, max_new_tokens=4, steps_per_turn=1)
PHASES = {"model": "load", "collect": "rollout", "train": "train", "publish": "publish"}
"""Stage of a run → the plan's phase."""


class PeakMemory(PlainProgress):
    """The most that the device held in each stage of a run; nothing where there is no device."""

    def __init__(self) -> None:
        import sys

        super().__init__(sys.stdout)
        self.bytes: dict[str, int] = {}
        self._stage = ""

    def stage(self, name: str) -> None:
        super().stage(name)
        if torch.cuda.is_available():
            phase = PHASES.get(self._stage)
            if phase is not None:
                self.bytes[phase] = max(self.bytes.get(phase, 0), torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        self._stage = name


def run(record: Record, *, adapter: str) -> None:
    shape = TINY if record.is_tiny else SHAPE
    record.add("shape", shape.name)
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        orbit = None
        for precision in ("INT4", "BF16"):
            folder = build_random_model(
                scratch / f"model-{precision}", precision, device=record.device, tiny=record.is_tiny
            )
            orbit = measure_orbit(record, replace(shape, precision=precision), folder, ADAPTERS[adapter], scratch)
        if adapter == "LoRA":
            assert orbit is not None
            measure_trl(record, shape, folder, scratch, orbit)


def measure_orbit(record: Record, shape: Shape, folder: Path, adapter: Mapping[str, Any], scratch: Path) -> float:
    """Seconds of a step."""
    asked = manifest(shape, folder, steps=1, adapter=adapter)
    machine = Machine(None, 0) if record.device == "cpu" else gpu_machine(asked.spec.placement)
    made = plan(asked, folder_facts(folder), machine)
    memory, turns = PeakMemory(), Turns()
    turn = orbit_turn(shape, folder, scratch / f"run-{shape.precision}", adapter=adapter, progress=memory)
    turn(turns)
    release()
    planned: dict[str, int] = {phase: made.total(phase) for phase in made.phases}
    told = [name for name, value in turns.rows[0].items() if name.startswith("seconds_") and value is not None]
    seconds = {name: median(turns, name) for name in told}
    record.add(f"Orbit, {shape.precision}", {
        "seconds": seconds,
        "tokens a second": median(turns, "tokens_per_second"),
        "tokens of a completion": statistics.mean(turns.tokens),
        "parity": {name: median(turns, name) for name in turns.rows[0] if name.startswith("parity_")},
        "planned bytes": planned,
        "most bytes": memory.bytes or None,
        "planned over measured": {name: planned[name] / size for name, size in memory.bytes.items() if size} or None,
    })  # fmt: skip
    return seconds["seconds_total"]


def measure_trl(record: Record, shape: Shape, folder: Path, scratch: Path, orbit: float) -> None:
    try:
        need_packages("trl", "peft", "datasets", install="`make gpu-wheels` gathers them")
    except NotMeasured as missing:
        record.add("TRL + PEFT, BF16", f"not measured: {missing}")
        return
    turns = Turns()
    turn = trl_turn(shape, folder, scratch / "trl", "float32" if record.device == "cpu" else "bfloat16")
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    turn(turns)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    record.add("TRL + PEFT, BF16", {
        "seconds": turns.seconds[0], "tokens of a completion": statistics.mean(turns.tokens), "most bytes": peak,
        "over Orbit's seconds": turns.seconds[0] / orbit,
    })  # fmt: skip


def median(turns: Turns, name: str) -> float:
    return statistics.median(row[name] for row in turns.rows)


def release() -> None:
    """What a run held is garbage once it has returned."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
