"""What `orbit doctor` says of machines with GPUs, by what `nvidia-smi` prints there.

A fake: there is no GPU. `nvidia-smi` and `nvcc` are scripts that print what the real ones do, and torch answers for a
GPU.
Belongs here: rows about GPUs. Does not belong here: the command (`test_commands`).
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from orbit_runtime.cli import doctor
from orbit_runtime.cli.doctor import Finding, has_kernels
from orbit_runtime.quant.kernels import choice, compiled

B200 = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.95.05              Driver Version: 580.95.05      CUDA Version: 13.0     |
|-----------------------------------------+------------------------+----------------------+
"""
OLDER = B200.replace("580.95.05", "550.54.15").replace("13.0", "12.4")
NVLINK = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    "GPU0\t X \tNV18\tPXB\t0-55\t0\nGPU1\tNV18\t X \tSYS\t0-55\t0\nNIC0\tPXB\tSYS\t X \t\t\n\n"
    "Legend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
)
PCIE = NVLINK.replace("NV18", "PHB")
PEERS = " \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tOK\tX\t\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n"
NO_PEERS = PEERS.replace("OK\t", "CNS\t")
ALONE = "\t\x1b[4mGPU0\tCPU Affinity\x1b[0m\nGPU0\t X \t0-25\n"
NVCC = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release {}, V{}.88\n"


def play(folder: Path, name: str, **said: str) -> None:
    """A program that prints a text for its arguments, joined by `_` without dashes."""
    for key, text in said.items():
        (folder / f"{name}.{key}").write_text(text)
    program = folder / name
    program.write_text(
        f'#!/bin/sh\nkey=$(echo "x$*" | /usr/bin/tr -d -- "- ")\n/bin/cat "{folder}/{name}.$key" 2>/dev/null\n'
    )
    program.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only programs that are found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in ("CC", "CXX", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    choice.triton_lacks.cache_clear()
    return tmp_path


@pytest.mark.parametrize(
    ("header", "links", "peers", "expected"),
    [
        (B200, ALONE, "", [("driver", "ok", "580.95.05, for CUDA up to 13.0", "")]),
        (B200, NVLINK, PEERS, [("driver", "ok", "", ""), ("gpu-links", "ok", "NVLink", "")]),
        (B200, PCIE, PEERS, [("driver", "ok", "", ""), ("gpu-links", "note", "PHB: not all", "tensorParallel")]),
        (B200, PCIE, NO_PEERS, [("driver", "ok", "", ""), ("gpu-links", "warn", "cannot read", "ACS")]),
        (OLDER, ALONE, "", [("driver", "fail", "550.54.15, for CUDA up to 12.4; torch is", "CUDA 13.0 or later")]),
        ("", "", "", []),
    ],
)  # fmt: skip
def test_the_driver_and_the_links_between_gpus(
    programs: Path, header: str, links: str, peers: str, expected: list[tuple[str, str, str, str]]
) -> None:
    play(programs, "nvidia-smi", x=header, xtopom=links, xtopop2pr=peers)
    found = doctor.check_driver()
    assert [(each.id, each.state) for each in found] == [(name, state) for name, state, _, _ in expected]
    for each, (_, _, says, fix) in zip(found, expected, strict=True):
        assert says in each.detail
        assert fix in (each.fix or "")
        assert (each.fix is None) == (each.state == "ok")


def test_what_kernels_are_compiled_with(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> Finding:
        choice.triton_lacks.cache_clear()
        (finding,) = doctor.check_compilers()
        return finding

    # Without a GPU: for attention on the CPU.
    monkeypatch.setattr(compiled, "processor_flags", lambda: frozenset({"avx2"}))
    assert found()[:2] == ("compilers", "warn")
    play(programs, "cc")
    assert found() == Finding("compilers", "ok", str(programs / "cc"))
    (programs / "cc").unlink()
    play(programs, "nvidia-smi", x=B200)
    assert found()[1:] == (
        "warn", "packed weights are multiplied by torch: Triton finds no C compiler: install gcc", "install gcc",
    )  # fmt: skip
    play(programs, "gcc")
    (programs / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(programs))
    assert found().state == "note"
    assert "nvcc and a C++ compiler" in found().detail
    play(programs, "c++")
    (programs / "cuda/bin").mkdir(parents=True)
    play(programs / "cuda/bin", "nvcc", xversion=NVCC.format("13.5", "13.5"))
    assert (found().state, "nvcc 13.5" in found().detail, "toolkit 13.0" in (found().fix or "")) == ("note", True, True)
    play(programs / "cuda/bin", "nvcc", xversion=NVCC.format("13.0", "13.0"))
    assert (found().state, found().fix) == ("ok", None)


@pytest.mark.parametrize(
    ("name", "capability", "free", "state", "says", "fix"),
    [
        ("NVIDIA B200", (10, 0), 170, "ok", "compute capability 10.0, 170.0 GiB free", None),
        ("NVIDIA B300", (10, 3), 170, "ok", "compute capability 10.3", None),
        ("NVIDIA H100 80GB HBM3", (9, 0), 20, "warn", "20.0 GiB free", "see nvidia-smi"),
        ("Tesla V100", (7, 0), 170, "warn", "no BF16 matrix units", "hide it"),
        ("Another", (11, 0), 170, "warn", "this torch has no kernels for it", "sm_110"),
    ],
)  # fmt: skip
def test_each_gpu(
    name: str, capability: tuple[int, int], free: int, state: str, says: str, fix: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    properties = SimpleNamespace(name=name, major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free << 30, 180 << 30))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90", "sm_100", "sm_120"])
    (found,) = doctor._gpu_findings()
    assert (found.id, found.state) == ("gpu", state)
    assert says in found.detail
    assert (fix or "") in (found.fix or "")


def test_kernels_serve_later_cards_of_their_own_major_version_and_ptx_any_later_one() -> None:
    assert has_kernels((8, 9), ["sm_80"])
    assert not has_kernels((8, 0), ["sm_86"])
    assert not has_kernels((10, 3), ["sm_90", "sm_100a"])
    assert has_kernels((10, 0), ["sm_100a"])
    assert has_kernels((12, 1), ["compute_90"])
