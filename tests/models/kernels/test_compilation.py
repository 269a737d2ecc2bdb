"""Every kind of weight compiles for the devices it is made for: with their matrix instructions, and within registers.

No device is needed: Triton carries an assembler. What this cannot show is speed.
"""

from __future__ import annotations

import json
import os
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
KERNELS = {"dequantize_kernel", "forward_kernel", "input_gradient_kernel"}


def compiled(capability: int, *layouts: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, str(PROGRAM), str(capability), *layouts]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=600)
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
