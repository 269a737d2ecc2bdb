"""Every kind of weight compiles for the devices it is made for: with their matrix instructions, and within registers.

No device is needed: Triton carries an assembler. What this cannot show is speed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "tests" / "fakes" / "compiling_driver.py"
SHARED_BYTES = 227 * 1024
"""What one block can have on compute capability 9.0 and 10.0."""
LAYOUTS = ("INT4", "INT4Asymmetric", "FP8", "FP8Block", "NVFP4", "MXFP4")
SPILLS = {
    (90, "INT4Asymmetric", "forward_kernel", "256 x 128 x 64"): 8,
    (100, "FP8Block", "forward_kernel", "64 x 128 x 64"): 24,
    (100, "FP8Tensor", "forward_kernel", "64 x 128 x 64"): 24,
    (100, "FP8Tensor", "input_gradient_kernel", "128 x 64 x 64"): 8,
}
"""Bytes that a tile may keep outside of registers: few, and said beside the tiles."""
KERNELS = {"dequantize_kernel", "forward_kernel", "input_gradient_kernel"}


def compiled(capability: int, *layouts: str, timeout: float = 600) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, str(PROGRAM), str(capability), *layouts]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=timeout)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return [json.loads(line) for line in finished.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("capability", "instruction"), [(90, "wgmma.mma_async"), (100, "tcgen05.mma")])
def test_all_kernels_compile_without_spilling_and_multiply_with_the_devices_matrix_unit(
    capability: int, instruction: str
) -> None:
    kernels = compiled(capability, *LAYOUTS)
    turning = [each for each in kernels if each["name"] == "rotation_kernel"]
    assert [each["layout"] for each in turning] == ["R of 8", "R of 32", "R of 128"]
    kernels = [each for each in kernels if each not in turning]
    assert {(each["layout"], each["name"], each["grouped"]) for each in kernels} == {
        (layout, name, grouped)
        for layout in LAYOUTS
        for name in KERNELS
        for grouped in ([False] if name == "dequantize_kernel" else [False, True])
    }
    for each in kernels:
        assert each["stack"] == 0, f"registers spilled: {each}"
        assert each["shared"] <= SHARED_BYTES, each
        assert each["mma"] == ([] if each["name"] == "dequantize_kernel" else [instruction]), each
        assert not each["flushes_subnormals"], f"subnormal scales would be lost: {each}"
    for each in turning:
        assert each["stack"] == 0, f"registers spilled: {each}"
        assert each["shared"] <= SHARED_BYTES, each
        assert each["mma"], each


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("capability", "kinds"),
    [
        (90, ["MXFP4"]), (100, ["MXFP4"]),
        *(pytest.param(capability, [], marks=pytest.mark.long) for capability in (80, 89, 90, 100, 103, 120)),
    ],
)  # fmt: skip
def test_every_tile_compiles_fits_and_adds_by_its_kernels_one_instruction(capability: int, kinds: list[str]) -> None:
    """Which tile is the fastest may differ from one process to the next, and must change no sum. Cards with less shared
    memory than the tiles were chosen for pass over the large ones: the smallest fits everywhere."""
    kernels: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for each in compiled(capability, *kinds, "--tiles", timeout=7000):
        names = ("kind", "group", "scales", "experts", "kernel")
        kernels.setdefault(tuple(str(each[name]) for name in names), []).append(each)
    assert len(kernels) >= 4
    for key, tiles in kernels.items():
        assert not [each for each in tiles if "error" in each], key
        assert len({tuple(each["mma"]) for each in tiles}) == 1, key
        assert tiles[0]["fits"], key
        assert capability not in (90, 100, 103) or all(each["fits"] for each in tiles), key
        for each in tiles if capability in (90, 100) else ():
            size = " x ".join(re.findall(r"\d+", each["tiles"])[:3])
            spilled = SPILLS.get((capability, each["kind"], each["kernel"], size), 0)
            assert each["stack"] <= spilled, f"registers spilled: {each}"


def test_what_triton_compiles_before_its_first_launch_needs_gcc_and_no_device(tmp_path: Path) -> None:
    """Its calls of the driver, against a library that has the driver's name and nothing in it."""
    stub = ["gcc", "-shared", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run(stub, check=True)
    folders = {"TRITON_LIBCUDA_PATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}
    program = (
        "import os, sys; sys.setdlopenflags(os.RTLD_LAZY); from triton.backends.nvidia.driver import CudaUtils; "
        "print(CudaUtils().load_binary)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, **folders, "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        check=False,
    )
    assert "built-in function load_binary" in finished.stdout, finished.stderr[-3000:]
    assert list(tmp_path.glob("cache/*/*.so"))
