"""What holds for every test: no network, two maths threads, and a printed reason where a device is missing.

Does not belong here: fixtures of one package (they live in that package's folder) and fakes (`tests/fakes`).
"""

from __future__ import annotations

import os

# Before any import of torch or transformers, which read them once.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("MKL_NUM_THREADS", "2")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if not os.path.exists("/dev/nvidiactl"):
    # Triton decides when it is first imported, by whoever it is: without a GPU its kernels run in its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

import hypothesis
import pytest

# The same examples in every run; `--hypothesis-profile=default` searches anew.
hypothesis.settings.register_profile("orbit", deadline=None, derandomize=True)
hypothesis.settings.load_profile("orbit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device here"))
