"""A CUDA driver for Triton that compiles for a device that is not there, and launches nothing.

As a program (`python compiling_driver.py 90 INT4 NVFP4`) it prints a JSON line for each kernel that our launches
compile for that compute capability; with `--tiles` for every tile, group and dtype of scales of these kinds, and of all
kinds that the capability admits if none is named. It must run in a process of its own, without Triton's interpreter.

Belongs here: compiling. Does not belong here: any expectation.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget


class CompilingDriver:
    """What Triton asks of a driver; a launch does nothing."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)
        self.utils = SimpleNamespace(
            load_binary=lambda name, binary, shared, device: (object(), object(), 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 232448, "max_num_regs": 65536, "warpSize": 32},
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: None

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def facts(kernel: Any, folder: Path) -> dict[str, Any]:
    """What a compiled kernel needs of the device, and which instructions it uses."""
    path = folder / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([program, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    ptx = kernel.asm["ptx"]
    return {
        "name": kernel.metadata.name,
        "registers": int(re.findall(r"REG:(\d+)", usage)[-1]),
        "stack": int(re.findall(r"STACK:(\d+)", usage)[-1]),
        "shared": kernel.metadata.shared,
        "mma": sorted(set(re.findall(r"(wgmma\.mma_async|tcgen05\.mma|mma\.sync)", ptx))),
        "flushes_subnormals": bool(re.search(r"(mul|add|sub|fma|cvt)[.\w]*\.ftz", ptx)),
        "fuses": bool(re.search(r"\bfma\.rn\.(f32|bf16)", ptx)),
        "wide_loads": len(re.findall(r"cp\.async\.\w+\.\w+\.\w+ .*16", ptx)),
    }


SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
"""Shared memory that a block can have, by compute capability (CUDA C++ Programming Guide, technical specifications)."""
FORMS = (
    *(("INT4", group, torch.uint16) for group in (32, 64, 128, 256, 512)),
    *(("INT4Asymmetric", group, dtype) for group in (32, 128) for dtype in (torch.uint16, torch.float16)),
    *((kind, 0, torch.float32) for kind in ("FP8Row", "FP8Tensor", "FP8Block")),
    *((kind, 16, torch.uint8) for kind in ("NVFP4", "NVFP4ModelOpt")),
    ("MXFP4", 32, torch.uint8),
)
"""Kind, group and dtype of scales of each weight that kernels read; a group of 512 is the whole row here."""
ROWS, COLUMNS, TOKENS = 256, 512, 128


def every_tile(capability: int, kinds: list[str]) -> None:
    """Compiles each kernel with each of its tiles, and prints what it needs or why it does not compile."""
    from triton.runtime.jit import JITFunction

    from orbit_runtime.quant.kernels import launch
    from orbit_runtime.quant.kernels.choice import E4M3_CAPABILITY, MINIMUM_CAPABILITY
    from orbit_runtime.quant.kernels.operands import GROUPS, Operands, WeightForm

    triton.runtime.driver.set_active(CompilingDriver(capability))
    compiled: list[Any] = []
    compile_and_run = JITFunction.run
    JITFunction.run = lambda self, *given, **more: compiled.append(compile_and_run(self, *given, **more))
    x, dy = (torch.zeros(TOKENS, size, dtype=torch.bfloat16) for size in (COLUMNS, ROWS))
    ends = torch.tensor([40, 100, 128], dtype=torch.int32)
    launches = {
        "forward_kernel": (
            launch.FORWARD_TILES,
            lambda form, ends, tiles: launch.forward(x, form, offsets_E=ends, tiles=tiles),
        ),
        "input_gradient_kernel": (
            launch.GRADIENT_TILES,
            lambda form, ends, tiles: launch.input_gradient(dy, form, offsets_E=ends, tiles=tiles),
        ),
    }
    with tempfile.TemporaryDirectory() as folder:
        for kind, group, dtype in FORMS:
            if divmod(capability, 10) < MINIMUM_CAPABILITY.get(kind, E4M3_CAPABILITY) or (kinds and kind not in kinds):
                continue
            group = group or GROUPS.get(kind, COLUMNS)
            for experts in (1, 3):
                width = COLUMNS if kind.startswith("FP8") else COLUMNS // 2
                scales = {"FP8Row": ROWS, "FP8Tensor": 1, "FP8Block": ROWS * COLUMNS // 128**2}
                scale = torch.empty(experts, scales.get(kind, ROWS * COLUMNS // group), dtype=dtype)
                extra = {"INT4Asymmetric": torch.empty(experts, ROWS // 8 * COLUMNS // group, dtype=torch.int32)}
                extra |= dict.fromkeys(("NVFP4", "NVFP4ModelOpt"), torch.empty(experts, dtype=torch.float32))
                codes = torch.empty(experts, ROWS, width, dtype=torch.uint8)
                operands = Operands(
                    WeightForm(kind, group, experts, ROWS, COLUMNS), codes, scale, extra.get(kind, scale)
                )
                for name, (choices, run) in launches.items():
                    for tiles in choices:
                        what = {"kind": kind, "group": group, "scales": str(dtype), "experts": experts, "kernel": name}
                        try:
                            run(operands, ends if experts > 1 else None, tiles)
                            needs = facts(compiled.pop(), Path(folder))
                            needs["fits"] = needs["shared"] <= SHARED_KIB[capability] << 10
                        except Exception as error:
                            needs = {"fits": False, "error": f"{type(error).__name__}: {error}"[:200]}
                        print(json.dumps(what | {"tiles": str(tiles)} | needs), flush=True)


def main(capability: int, layouts: list[str]) -> None:
    from fakes.kernel_weights import operands_of, ordinary, stack_on
    from triton.runtime.jit import JITFunction

    from orbit_runtime.quant.kernels import launch
    from orbit_runtime.quant.kernels.launch import fitting
    from orbit_runtime.sglang_plugin.rotation_kernel import rotate_rows

    triton.runtime.driver.set_active(CompilingDriver(capability))
    results: list[Any] = []

    compile_and_run = JITFunction.run

    def recording(self: Any, *arguments: Any, **settings: Any) -> Any:
        results.append(compile_and_run(self, *arguments, **settings))
        return results[-1]

    JITFunction.run = recording
    rows, columns, tokens = 256, 512, 128
    x, dy = (torch.zeros(tokens, size, dtype=torch.bfloat16) for size in (columns, rows))
    offsets = torch.tensor([40, 100, 128], dtype=torch.int32)
    with tempfile.TemporaryDirectory() as folder:
        for layout in layouts:
            single = operands_of(ordinary(layout, rows, columns), "cpu")
            _, stack = stack_on([ordinary(layout, rows, columns, seed) for seed in range(3)], "cpu")
            launch.dequantize(single)
            for operands, ends in ((single, None), (stack, offsets)):
                forward, gradient = (fitting(each, tokens) for each in (launch.FORWARD_TILES, launch.GRADIENT_TILES))
                launch.forward(x, operands, offsets_E=ends, tiles=forward)
                launch.input_gradient(dy, operands, offsets_E=ends, tiles=gradient)
            for number, kernel in enumerate(results):
                line = {"layout": layout, "grouped": number > 2} | facts(kernel, Path(folder))
                print(json.dumps(line), flush=True)
            results.clear()
        for size in (8, 32, 128):
            R = torch.zeros(8, 2, size, size, dtype=torch.bfloat16)
            rotate_rows(torch.zeros(tokens, 2 * size, dtype=torch.bfloat16), R, torch.zeros(tokens, dtype=torch.int32))
            print(
                json.dumps({"layout": f"R of {size}", "grouped": False} | facts(results.pop(), Path(folder))),
                flush=True,
            )


if __name__ == "__main__":
    if "--tiles" in sys.argv:
        every_tile(int(sys.argv[1]), [each for each in sys.argv[2:] if each != "--tiles"])
    else:
        main(int(sys.argv[1]), sys.argv[2:])
