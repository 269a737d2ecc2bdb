"""Untrusted Python computes, and does nothing else."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from orbit_runtime.workers.user_code import sandbox_child
from orbit_runtime.workers.user_code.confine import ARCHITECTURES, NUMBERS, build_filter, landlock_version
from orbit_runtime.workers.user_code.sandbox import SandboxLimits, SandboxUnavailable, run_program

LIMITS = SandboxLimits(seconds=3.0, memory_bytes=128 << 20)
LOCKS = pytest.mark.skipif(landlock_version() < 4, reason="this kernel's Landlock cannot keep the network away")


@LOCKS
def test_a_program_computes_prints_and_reads_its_input() -> None:
    result = run_program("import json, threading\nprint(1 + int(input()))\nopen('a', 'w').write('b')", "41\n", LIMITS)
    assert (result.ended, result.output) == ("done", "42\n")


@LOCKS
@pytest.mark.parametrize(
    "program",
    [
        "import socket; socket.socket()",
        "import socket; socket.create_connection(('127.0.0.1', 80))",
        "open('/etc/passwd')",
        "open('/proc/1/environ')",
        "import os; os.listdir('/')",
        "open('/var/tmp/written', 'w')",
        "import os; os.fork()",
        "import os; os.execv('/bin/sh', ['sh'])",
        "import os; os.kill(os.getppid(), 0)",
        "import os; os.mkdir('/var/tmp/x')",
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True); 1 / (1 + libc.unshare(0x10000000))",
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True); 1 / (1 + libc.ptrace(0, 0, 0, 0))",
        "bytearray(1 << 30)",
        "open('big', 'wb').write(bytes(1 << 25))",
        "x = [open('f%d' % n, 'w') for n in range(100)]",
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "def",
    ],
)
def test_what_a_program_may_not_do_fails(program: str) -> None:
    assert run_program(program, "", LIMITS).ended == "failed"


@LOCKS
def test_a_program_that_does_not_end_or_prints_too_much_is_ended() -> None:
    assert run_program("import time\ntime.sleep(3600)", "", SandboxLimits(seconds=0.5)).ended == "timeout"
    result = run_program("while True: print('x' * 1000)", "", LIMITS)
    assert result.ended == "output"
    assert len(result.output) == LIMITS.output_bytes


@LOCKS
def test_nothing_of_the_runs_environment_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "secret")
    assert "secret" not in run_program("import os\nprint(os.environ)", "", LIMITS).output


@LOCKS
def test_the_scratch_folder_is_removed() -> None:
    folder = run_program("import os\nprint(os.getcwd())", "", LIMITS).output.strip()
    assert folder
    assert not Path(folder).exists()


@pytest.mark.parametrize("lock", ["confine_files", "forbid"])
def test_where_a_lock_does_not_close_nothing_is_run(lock: str, tmp_path: Path) -> None:
    """In a child of its own: what it locks stays locked."""
    script = (
        f"from pathlib import Path\nfrom orbit_runtime.workers.user_code import sandbox_child\n"
        f"sandbox_child.{lock} = lambda *_: False\n"
        f"limits = {{'seconds': 1, 'memory_bytes': 1 << 28, 'file_bytes': 1 << 20}}\n"
        f"sandbox_child.lock_up(Path({str(tmp_path)!r}), limits)\n"
    )
    root = str(Path(sandbox_child.__file__).parents[3])
    done = subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": root}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "this kernel has no" in done.stderr


def test_a_machine_that_cannot_lock_up_is_an_error_and_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is started without the module that locks it up."""
    monkeypatch.setattr("orbit_runtime.workers.user_code.sandbox.CHILD_MODULE", "this")
    with pytest.raises(SandboxUnavailable):
        run_program("print(1)", "", LIMITS)


@pytest.mark.parametrize("machine", sorted(NUMBERS))
def test_a_filter_answers_each_call_as_it_should(machine: str) -> None:
    """Stepped through by hand: seccomp's own interpreter runs this machine's only."""
    numbers, architecture = NUMBERS[machine], ARCHITECTURES[machine]
    steps = [struct.unpack_from("=HBBI", build_filter(machine, ("socket",)), at) for at in
             range(0, len(build_filter(machine, ("socket",))), 8)]  # fmt: skip

    def answer(number: int, argument: int = 0, arch: int = architecture) -> int:
        data, at, value = {0: number, 4: arch, 16: argument}, 0, 0
        while True:
            code, yes, no, constant = steps[at]
            if code == 0x06:
                return int(constant)
            if code == 0x20:
                value = data[constant]
                at += 1
                continue
            is_true = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[code]
            at += 1 + (yes if is_true else no)

    allow, refused, killed = 0x7FFF0000, 0x00050001, 0x80000000
    assert answer(numbers["socket"]) == refused
    assert answer(0) == allow
    assert answer(numbers["clone"], 0x00010000) == allow
    assert answer(numbers["clone"], 17) == refused
    assert answer(numbers["clone3"]) == 0x00050000 | 38
    assert answer(0, arch=0x40000003) == killed
    if machine == "x86_64":
        assert answer(numbers["fork"]) == refused
        assert answer(0x40000000) == killed
