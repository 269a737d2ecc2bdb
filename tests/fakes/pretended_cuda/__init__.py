"""A pretended CUDA device: a fake for tests. Processes that are started with its environment find a GPU in torch, whose
memory is the host's and whose kernels are the CPU's; Triton launches nothing on it.

Belongs here: its environment. Does not belong here: what the device does (`device`, `runtime.c`).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]


def pretended_environment(scratch: Path, *, cards: int = 1) -> dict[str, str]:
    """Variables with which a process of this environment's Python has the devices.

    Args:
        scratch: keeps the runtime, which gcc builds here.
    """
    import triton

    runtime = scratch / "libcuda.so.1"
    if not runtime.exists():
        scratch.mkdir(parents=True, exist_ok=True)
        headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
        command = ["gcc", "-shared", "-fPIC", "-w", f"-I{headers}", "-Wl,-soname,libcuda.so.1", "-o"]
        subprocess.run([*command, str(runtime), str(FOLDER / "runtime.c")], check=True)
    return {
        "PYTHONPATH": os.pathsep.join([str(FOLDER / "start"), str(ROOT), str(ROOT / "operator")]),
        "PRETENDED_RUNTIME": str(runtime),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(cards))),
        "ORBIT_KERNELS": "Torch",
        # Each kernel is so small that threads would wait for each other only.
        "OMP_NUM_THREADS": "1",
    }
