"""Memory that runs out has its exit code, and the stage and field that would help; it is no bug in Orbit."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from orbit_runtime.errors import EngineDiedError, GPUFaultError, OutOfMemoryError, gpu_fault, is_out_of_memory
from orbit_runtime.loop.run import device_errors_with_stage
from orbit_runtime.workers.servers.process import ServerProcess
from orbit_runtime.workers.system import memory_kills


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"), True),
        (RuntimeError("std::bad_alloc"), True),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_memory(error: BaseException, is_memory: bool) -> None:
    assert is_out_of_memory(error) == is_memory


def test_torchs_own_error_on_a_cpu_counts() -> None:
    torch = pytest.importorskip("torch", reason="the light install has no torch")
    with pytest.raises(RuntimeError) as caught:
        # More than there are addresses: a kernel that overcommits (a kubelet sets it so) refuses it, too.
        torch.empty(1 << 50, dtype=torch.uint8).fill_(1)
    assert is_out_of_memory(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "said",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
    ],
)
def test_a_server_that_finds_no_memory_at_its_start_is_out_of_memory(tmp_path: Path, said: str) -> None:
    code = f"import sys; print({said!r}, file=sys.stderr); print('Killed process'); sys.exit(1)"
    process = ServerProcess("SGLang", [sys.executable, "-c", code], environment=os.environ, log=tmp_path / "log")
    with pytest.raises(OutOfMemoryError, match=r"SGLang ended with 1 while it started: .*emory") as caught:
        process.wait_until(lambda: False, seconds=20)
    assert caught.value.exit_code == 79
    assert "maxRunningRequests" in str(caught.value.fix)


def test_a_server_that_somebody_kills_is_not(tmp_path: Path) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    process = ServerProcess("SGLang", [sys.executable, "-c", code], environment=os.environ, log=tmp_path / "log")
    with pytest.raises(EngineDiedError, match="was killed by SIGKILL while it started"):
        process.wait_until(lambda: False, seconds=20)


def test_a_server_that_goes_on_writing_has_longer_than_one_that_is_silent(tmp_path: Path) -> None:
    code = "import sys, time\nfor shard in range(8): print('shard', shard, flush=True); time.sleep(0.4)\nsys.exit(3)"
    process = ServerProcess("SGLang", [sys.executable, "-c", code], environment=os.environ, log=tmp_path / "log")
    with pytest.raises(EngineDiedError, match="ended with 3 while it started: shard 7"):
        process.wait_until(lambda: False, seconds=2.0)
    silent = ServerProcess("SGLang", ["sleep", "60"], environment=os.environ, log=tmp_path / "log2")
    with pytest.raises(EngineDiedError, match="wrote nothing to its log for 1 s"):
        silent.wait_until(lambda: False, seconds=1)
    silent.stop()


@pytest.mark.parametrize(
    ("error", "is_fault"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be …"), True),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("CUDA error"), False),
    ],
)
def test_a_fault_of_the_gpu_is_known_by_its_words_and_named_with_the_stage(error: Exception, is_fault: bool) -> None:
    fault = gpu_fault(error)
    assert (fault is not None) == is_fault
    show = SimpleNamespace(current="train")
    expected = GPUFaultError if is_fault else Exception
    with pytest.raises(expected) as caught, device_errors_with_stage(show):  # type: ignore[arg-type]
        raise error
    if is_fault:
        assert caught.value.exit_code == 80
        assert "(stage train)" in str(caught.value)
        assert "\n" not in caught.value.message


def test_the_kernels_count_is_read(tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    assert memory_kills(events) == 0
    events.write_text("low 0\nhigh 0\nmax 7\noom 2\noom_kill 3\noom_group_kill 0\n")
    assert memory_kills(events) == 3
