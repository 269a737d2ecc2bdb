"""Run inside the runtime's image by its smoke test, without a device: does everything compile that Triton compiles when
it first runs?

gcc: Triton's calls of the driver, against a library that has the driver's name and nothing in it. ptxas: a tile of the
product with an INT4 weight, for compute capability 10.0. Triton's interpreter: the same kernel, by the codec's values.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from types import SimpleNamespace

PART, INTERPRETED = "ORBIT_SMOKE_PART", "TRITON_INTERPRET"


def compile_driver() -> None:
    from triton.backends.nvidia.driver import CudaUtils

    assert callable(CudaUtils().load_binary)


def multiply() -> None:
    """With Triton's interpreter, or compiled only, as the environment says."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    from orbit_runtime.quant import int4
    from orbit_runtime.quant.kernels.launch import Tiles, forward
    from orbit_runtime.quant.kernels.operands import build_operands

    generator = torch.Generator().manual_seed(0)
    weight = int4.quantize(torch.randn(40, 128, generator=generator), 32)
    x = torch.randn(19, 128, generator=generator).bfloat16()
    operands = build_operands("INT4", [*int4.buffers(weight).values()])
    assert operands is not None
    kernels = []
    if INTERPRETED not in os.environ:
        from triton.runtime.jit import JITFunction

        run = JITFunction.run
        JITFunction.run = lambda self, *given, **more: kernels.append(run(self, *given, **more))
        limits = {"max_shared_mem": 232448, "max_num_regs": 65536, "warpSize": 32}
        utils = SimpleNamespace(
            load_binary=lambda *given: (object(), object(), 0, 0, 1024), get_device_properties=lambda device: limits
        )
        triton.runtime.driver.set_active(SimpleNamespace(
            utils=utils, launcher_cls=lambda source, metadata: lambda *given: None,
            get_current_target=lambda: GPUTarget("cuda", 100, 32), get_current_device=lambda: 0,
            get_current_stream=lambda device: 0, get_active_torch_device=lambda: torch.device("cpu"),
        ))  # fmt: skip
    y = forward(x, operands, tiles=Tiles(16, 32, 64))
    if kernels:
        assert len(kernels[0].asm["cubin"]) > 0
    else:
        exact = x.double() @ int4.dequantize(weight, torch.float64).t()
        bound = exact.abs() * 2.0**-8 + 2.0**-12
        assert bool(((y.double() - exact).abs() <= bound).all())


def main() -> None:
    parts = {"driver": compile_driver, "kernel": multiply}
    if part := os.environ.get(PART):
        if part == "driver":
            # Names that nobody looks up need not be there.
            sys.setdlopenflags(os.RTLD_LAZY)
        return parts[part]()
    with tempfile.TemporaryDirectory() as folder:
        stub = ["gcc", "-shared", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so.1"]
        subprocess.run(stub, check=True)
        own = {"TRITON_LIBCUDA_PATH": folder, "LD_LIBRARY_PATH": folder, "TRITON_CACHE_DIR": f"{folder}/cache"}
        for part, more in (("driver", {}), ("kernel", {}), ("kernel", {INTERPRETED: "1"})):
            environment = {**os.environ, **own, PART: part, **more}
            subprocess.run([sys.executable, __file__], check=True, env=environment)
    print("smoke: gcc compiles Triton's calls of the driver, ptxas a tile, and the interpreter multiplies by it")


if __name__ == "__main__":
    main()
