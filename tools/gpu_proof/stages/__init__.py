"""The stages by name, in the order in which they run: first whether it works, then how it measures, then what a machine
must have brought.

A stage is a module with `run(record, **settings)`, which adds what it finds to the record as it finds it. It raises
`WrongResult` where that must not be and `NotMeasured` where it could not look; any other error is a failure too. It
runs in a process of its own, with at most eight minutes.

Belongs here: the list. Does not belong here: running it (`tools.gpu_proof.proof`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Stage:
    module: str
    settings: Mapping[str, Any] = field(default_factory=dict)


LAYOUTS = ("INT4", "FP8", "FP8Block", "NVFP4", "MXFP4")

STAGES: Mapping[str, Stage] = {
    "quickstart": Stage("quickstart"),
    **{what: Stage("works", {"what": what}) for what in ("resume", "formats", "serve")},
    "device-tests": Stage("device_tests"),
    "kernel-equality": Stage("kernel_equality"),
    "determinism": Stage("determinism"),
    **{f"kernel-speed-{layout.lower()}": Stage("kernel_speed", {"layout": layout}) for layout in LAYOUTS},
    "rotation-speed": Stage("rotation_speed"),
    "rl-step-lora": Stage("rl_step", {"adapter": "LoRA"}),
    "rl-step-oft": Stage("rl_step", {"adapter": "OFT"}),
    "recompute": Stage("recompute"),
    **{what: Stage("works", {"what": what}) for what in ("sglang", "ranks", "real-model")},
}
