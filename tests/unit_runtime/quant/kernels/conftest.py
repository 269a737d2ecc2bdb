"""Kernels run on a CUDA device where there is one, else in Triton's interpreter: chosen before they are imported."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

collect_ignore: list[str] = []
if importlib.util.find_spec("triton") is None:
    print("tests of kernels are not collected: Triton is not installed (it comes with torch on Linux)")
    collect_ignore += ["test_dequantize.py", "test_products.py", "test_compilation.py"]


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
