"""Kernels run on a CUDA device where there is one, else in Triton's interpreter, as `tests/conftest.py` sets it."""

from __future__ import annotations

import importlib.util

import pytest
import torch

collect_ignore: list[str] = []
if importlib.util.find_spec("triton") is None:
    print("tests of kernels are not collected: Triton is not installed (it comes with torch on Linux)")
    collect_ignore += ["test_dequantize.py", "test_products.py", "test_compilation.py", "test_rotation_kernel.py"]


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
