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
    question: str
    shows: str
    settings: Mapping[str, Any] = field(default_factory=dict)


LAYOUTS = ("INT4", "FP8", "FP8Block", "NVFP4", "MXFP4")

WORKS, MEASURES, BROUGHT = "Does it work?", "Is it right, and how fast?", "With what was brought along"

STAGES: Mapping[str, Stage] = {
    "quickstart": Stage("quickstart", WORKS, "the first run of every user learns; every publish is proven"),
    "resume": Stage("works", WORKS, "a run that is killed goes on by the same command", {"what": "resume"}),
    "formats": Stage("works", WORKS, "LoRA and OFT on packed bases; every publish is proven", {"what": "formats"}),
    "serve": Stage("works", WORKS, "base and trained adapter answer over HTTP", {"what": "serve"}),
    "device-tests": Stage("device_tests", MEASURES, "tests/gpu and the tests of kernels pass on the device"),
    "kernel-equality": Stage("kernel_equality", MEASURES, "weights as the codecs read them, products within bounds"),
    "determinism": Stage("determinism", MEASURES, "the same run twice has the same bits"),
    **{
        f"kernel-speed-{layout.lower()}": Stage(
            "kernel_speed", MEASURES, f"products of {layout} timed against BF16", {"layout": layout}
        )
        for layout in LAYOUTS
    },
    "rotation-speed": Stage("rotation_speed", MEASURES, "rotations of several adapters timed"),
    "rl-step-lora": Stage("rl_step", MEASURES, "a step of Qwen3-4B's shape: time, memory, plan", {"adapter": "LoRA"}),
    "rl-step-oft": Stage("rl_step", MEASURES, "the same step with OFT", {"adapter": "OFT"}),
    "recompute": Stage("recompute", MEASURES, "activations computed again: the same adapter; time and memory"),
    "sglang": Stage("works", BROUGHT, "two steps sampled by SGLang", {"what": "sglang"}),
    "ranks": Stage("works", BROUGHT, "two steps by ranks on two cards", {"what": "ranks"}),
    "real-model": Stage("works", BROUGHT, "two steps of a real model", {"what": "real-model"}),
}
