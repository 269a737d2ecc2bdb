"""What holds for every test: no network, two maths threads, and a printed reason where a device is missing.

Does not belong here: fixtures of one package (they live in that package's folder) and fakes (`tests/fakes`).
"""

from __future__ import annotations

import os
import time

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


def machine_factor() -> float:
    """How many times longer than alone a process takes here now, measured: 1 on a machine without other work."""
    began, computed = time.monotonic(), time.process_time()
    while time.process_time() < computed + 0.05:
        pass
    return max(1.0, (time.monotonic() - began) / 0.05)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """A test's time is that of an idle machine; beside other work it gets so much more."""
    if config.getoption("timeout", None) is None and (seconds := config.getini("timeout")):
        config.option.timeout = float(seconds) * machine_factor()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device here"))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products on a CPU by torch's library, as on a GPU, instead of Orbit's kernel."""
    from orbit_runtime.quant.kernels import panels

    monkeypatch.setattr(panels, "kernel", lambda _dtype: None)
