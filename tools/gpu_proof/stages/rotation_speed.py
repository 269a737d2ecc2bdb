"""Rows turned by their own slots' rotations (OFT in SGLang): one kernel against a loop over slots, and against a copy.

The loop is what a pass does without the kernel: in a CUDA graph, which may not depend on the batch, all rows for every
slot of the server; elsewhere each run of rows with one slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import Tensor

from benchmarks.harness import compare
from orbit_runtime.adapters.oft import rotate
from orbit_runtime.sglang_plugin.rotation_kernel import rotate_rows
from tools.gpu_proof.record import Record

SLOTS = 8
USED = (1, 3)
"""Slots in the batch."""
ROWS = (1, 64, 256, 8192)
"""Of decoding, and of a prefill."""
WIDTH, BLOCK = 7168, 32
CALLS, REPETITIONS = 50, 5


def run(record: Record) -> None:
    device = record.device
    width, calls = (64, 1) if record.is_tiny else (WIDTH, CALLS)
    generator = torch.Generator().manual_seed(0)
    R = torch.randn(SLOTS, width // BLOCK, BLOCK, BLOCK, generator=generator).bfloat16().to(device)
    record.add("features, block, slots", [width, BLOCK, SLOTS])
    for rows in (3,) if record.is_tiny else ROWS:
        x = torch.randn(rows, width, generator=generator).bfloat16().to(device)
        target = torch.empty_like(x)
        for used in USED:
            slots = (torch.arange(rows, dtype=torch.int32) * used // rows).to(device)
            named = f"{rows} rows of {used} slots"
            for name, loop in (
                ("every slot", lambda x=x, slots=slots: every_slot(x, R, slots)),
                ("each run", lambda x=x, used=used: each_run(x, R, used)),
                ("a copy", lambda x=x, target=target: target.copy_(x)),
            ):
                row = compare(
                    f"{named}, against {name}",
                    ("one kernel", repeated(lambda x=x, slots=slots: rotate_rows(x, R, slots), calls)),
                    (name, repeated(loop, calls)),
                    repetitions=1 if record.is_tiny else REPETITIONS,
                )
                record.add(row.name, asdict(row) | {"calls that a time is of": calls})


def repeated(function: Callable[[], object], calls: int) -> Callable[[], None]:
    def work() -> None:
        for _ in range(calls):
            function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return work


def every_slot(x: Tensor, R: Tensor, slots: Tensor) -> Tensor:
    turned = x
    for slot in range(len(R)):
        turned = torch.where(slots[:, None] == slot, rotate(x, R[slot]), turned)
    return turned


def each_run(x: Tensor, R: Tensor, used: int) -> Tensor:
    turned = x.clone()
    for slot in range(used):
        first, last = (-(-len(x) * at // used) for at in (slot, slot + 1))
        if first < last:
            turned[first:last] = rotate(x[first:last], R[slot])
    return turned
