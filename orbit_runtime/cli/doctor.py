"""`orbit doctor`: what this machine can run, and what is missing.

Belongs here: one function per finding, each with an id that `docs/troubleshooting.md` explains.
Does not belong here: repairing anything.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer

from orbit_runtime.cli.output import AsJson, format_bytes, format_json, format_table
from orbit_runtime.errors import EXIT_DONE, OrbitError, UnsupportedError
from orbit_runtime.workers.system import container_memory, run_nvidia_smi, usable_cores

State = Literal["ok", "note", "warn", "fail"]

PYTHON_RANGE = ((3, 12), (3, 15))
MIN_MEMORY = 2 << 30
MIN_DISK = 1 << 30
MIN_SHARED_MEMORY = 1 << 29
"""Ray's object store, and what torch and gloo put beside it."""
MIN_DRIVER_CAPABILITY = (8, 0)
"""BF16 matrix units: Ampere and later."""
MAX_CLOCK_SKEW_SECONDS = 5.0
NO_VERSION = "(no version)"


class Finding(NamedTuple):
    """`note`: missing, and only some need it; `warn`: works, but badly; `fail`: `orbit run` cannot work."""

    id: str
    state: State
    detail: str
    fix: str | None = None


def doctor(
    store: Annotated[str | None, typer.Option(metavar="URI", help="Also write to and read from this store.")] = None,
    as_json: AsJson = False,
) -> int:
    """Show what this machine can run and what is missing.

    \f
    Returns 0, or 78 when something without which nothing trains is missing.
    """
    findings = [finding for check in CHECKS.values() for finding in check()]
    if store is not None:
        findings.append(check_store(store))
    failed = any(finding.state == "fail" for finding in findings)
    if as_json:
        print(format_json({"ok": not failed, "findings": [finding._asdict() for finding in findings]}))
    else:
        print(format_table(["", "finding", ""], [[f.state, f.id, f.detail] for f in findings]))
        fixes = [f"{finding.id}: {finding.fix}" for finding in findings if finding.fix]
        if fixes:
            print("\nwhat to do:\n  " + "\n  ".join(fixes))
        print("\n" + ("`orbit run` cannot work here yet" if failed else "`orbit run` can work here"))
    return UnsupportedError.exit_code if failed else EXIT_DONE


def check_python() -> list[Finding]:
    version = sys.version_info[:2]
    words = f"{platform.python_version()} at {sys.executable}"
    if PYTHON_RANGE[0] <= version < PYTHON_RANGE[1]:
        return [Finding("python", "ok", words)]
    return [Finding("python", "fail", words, "use Python 3.12, 3.13 or 3.14")]


def check_train_extra() -> list[Finding]:
    from orbit_runtime.api.checks import NEEDED_TO_TRAIN

    missing = [name for name in NEEDED_TO_TRAIN if importlib.util.find_spec(name) is None]
    if missing:
        return [Finding("extra-train", "fail", f"missing: {', '.join(missing)}", "pip install 'orbit-rl[train]'")]
    return [Finding("extra-train", "ok", ", ".join(f"{name} {_version(name)}" for name in NEEDED_TO_TRAIN))]


def check_torch() -> list[Finding]:
    """Imports torch: a broken installation only shows itself so."""
    if importlib.util.find_spec("torch") is None:
        return []
    try:
        import torch
    except (ImportError, OSError) as error:
        fix = "reinstall torch for this machine: pip install --force-reinstall torch"
        return [Finding("torch", "fail", f"does not load: {error}", fix)]
    findings = [Finding("torch", "ok", f"{torch.__version__}, built for CUDA {torch.version.cuda or 'none'}")]
    cores = usable_cores()
    threads = torch.get_num_threads()
    if threads > cores:
        fix = f"set OMP_NUM_THREADS={cores}"
        findings.append(Finding("threads", "warn", f"{threads} threads on {cores} usable cores", fix))
    else:
        findings.append(Finding("threads", "ok", f"{threads} threads on {cores} usable cores"))
    if not torch.cuda.is_available():
        has_driver = shutil.which("nvidia-smi") is not None
        detail = "none visible" + (", although nvidia-smi is there" if has_driver else "; training on the CPU")
        fix = "compare the driver's CUDA version with torch's" if has_driver else None
        return [*findings, Finding("gpu", "warn" if has_driver else "note", detail, fix)]
    return [*findings, *_gpu_findings()]


def _gpu_findings() -> list[Finding]:
    import torch

    findings = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        free, total = torch.cuda.mem_get_info(index)
        words = (
            f"{index}: {properties.name}, compute capability {capability[0]}.{capability[1]}, "
            f"{format_bytes(free)} free of {format_bytes(total)}"
        )
        if capability < MIN_DRIVER_CAPABILITY:
            fix = "hide it with CUDA_VISIBLE_DEVICES, or use a GPU of compute capability 8.0 or later"
            findings.append(Finding("gpu", "warn", f"{words}: no BF16 matrix units", fix))
        elif not has_kernels(capability, torch.cuda.get_arch_list()):
            major, minor = capability
            fix = f"install a torch whose torch.cuda.get_arch_list() has sm_{major}{minor}, or hide the GPU"
            findings.append(Finding("gpu", "warn", f"{words}: this torch has no kernels for it", fix))
        elif free < 0.5 * total:
            findings.append(Finding("gpu", "warn", words, "another process holds its memory: see nvidia-smi"))
        else:
            findings.append(Finding("gpu", "ok", words))
    return findings


def has_kernels(capability: tuple[int, int], built: Sequence[str]) -> bool:
    """Whether a torch with these architectures runs on a GPU: kernels serve later minor versions of their own major
    one, those with an `a` no other, and PTX is compiled for any later one.

    Args:
        built: as `torch.cuda.get_arch_list` says, such as `sm_90`, `sm_100a`, `compute_120`.
    """
    for name in built:
        own = divmod(int(re.sub(r"\D", "", name)), 10)
        serves = own[0] == capability[0] or name.startswith("compute")
        if own == capability or (own < capability and serves and not name.endswith("a")):
            return True
    return False


def check_driver() -> list[Finding]:
    """Checks the driver against torch's CUDA, and how GPUs reach each other; nothing where there is no driver."""
    said = run_nvidia_smi()
    versions = re.search(r"Driver Version: (\S+).*?CUDA\D*Version: (\d+\.\d+)", said)
    if versions is None:
        return []
    built = _cuda_of_torch()
    words = f"{versions[1]}, for CUDA up to {versions[2]}"
    if built is not None and int(versions[2].split(".")[0]) < int(built.split(".")[0]):
        fix = f"install a driver for CUDA {built} or later, or a torch built for CUDA {versions[2].split('.')[0]}"
        return [Finding("driver", "fail", f"{words}; torch is built for {built}", fix)]
    return [Finding("driver", "ok", words), *_link_findings()]


def _link_findings() -> list[Finding]:
    links, peers = (_matrix(run_nvidia_smi("topo", *options)) for options in (("-m",), ("-p2p", "r")))
    if not links:
        return []
    kinds = ", ".join(sorted({"NVLink" if link.startswith("NV") else link for link in links}))
    if set(peers) - {"OK"}:
        fix = "see `nvidia-smi topo -p2p r`: an IOMMU, or ACS of a PCIe switch, keeps GPUs apart; turn it off"
        return [Finding("gpu-links", "warn", f"{kinds}; GPUs cannot read each other's memory", fix)]
    if kinds == "NVLink":
        return [Finding("gpu-links", "ok", kinds)]
    fix = "keep the parts of a matrix few: training.parallel.tensor and rollout.tensorParallel"
    return [Finding("gpu-links", "note", f"{kinds}: not all GPUs are joined by NVLink", fix)]


def _matrix(said: str) -> list[str]:
    """The cells between different GPUs in what `nvidia-smi topo` prints; empty for fewer than two."""
    lines = (line.split() for line in re.sub(r"\x1b\[[\d;]*m", "", said).splitlines())
    rows = [line for line in lines if "X" in line and re.match(r"GPU\d", line[0])]
    return [
        cell for index, row in enumerate(rows) for place, cell in enumerate(row[1 : len(rows) + 1]) if place != index
    ]


def check_compilers() -> list[Finding]:
    """Checks what kernels are compiled with when they first run."""
    if importlib.util.find_spec("torch") is None:
        return []
    from orbit_runtime.quant.kernels.choice import triton_lacks
    from orbit_runtime.quant.kernels.compiled import find_compiler

    if shutil.which("nvidia-smi") is None:
        if (compiler := find_compiler()) is not None:
            return [Finding("compilers", "ok", compiler)]
        words = "without a C compiler a CPU has torch's kernels: slower, and rollout may differ in its last bits"
        return [Finding("compilers", "warn", words, "install gcc, on Linux, or name a C compiler in CC")]

    lacks = triton_lacks()
    if lacks is not None:
        return [Finding("compilers", "warn", "packed weights are multiplied by torch: " + lacks, lacks.split(": ")[-1])]
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc, built = shutil.which("nvcc", path=f"{home}/bin") or shutil.which("nvcc"), _cuda_of_torch()
    fix = f"install g++ and CUDA's toolkit {built} (docs/guides/sglang.md, Compilers and downloads)"
    if nvcc is None or not (os.environ.get("CXX") or shutil.which("c++")):
        return [Finding("compilers", "note", "Triton's; SGLang's kernels need nvcc and a C++ compiler", fix)]
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release (\d+\.\d+)", said)
    words = f"Triton's; nvcc {release[1] if release else '?'} at {nvcc}"
    if release is None or release[1] != built:
        return [Finding("compilers", "note", f"{words}, torch is built for CUDA {built}", fix)]
    return [Finding("compilers", "ok", words)]


def _cuda_of_torch() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch.version.cuda


def check_extras() -> list[Finding]:
    found = []
    packages = (("sglang", "sglang"), ("megatron", "megatron-core"), ("ray", "ray"), ("operator", "kopf"))
    for extra, package in packages:
        version = _version(package)
        found.append(f"{extra} {'no' if version == NO_VERSION else version}")
    return [Finding("extras", "note", ", ".join(found))]


def check_ranks() -> list[Finding]:
    """Checks the parts of a divided model: ranks on Ray over Megatron-Core, SGLang's servers beside them, shared
    memory.
    """
    from orbit_runtime.workers.servers.process import PYTHON_VARIABLE

    wanted = (("megatron-core", "megatron"), ("ray", "ray"))
    missing = [extra for package, extra in wanted if _version(package) == NO_VERSION]
    lacks, fixes = [], []
    if missing:
        lacks.append(" and ".join(missing))
        fixes.append(f"pip install 'orbit-rl[{','.join(missing)}]'")
    python = os.environ.get(PYTHON_VARIABLE)
    if python is None and _version("sglang") == NO_VERSION:
        lacks.append("SGLang")
        fixes.append(f"name the interpreter of an environment with SGLang in {PYTHON_VARIABLE}")
    elif python is not None and not os.access(python, os.X_OK):
        lacks.append(f"SGLang ({python} cannot be run)")
        fixes.append(f"correct {PYTHON_VARIABLE}")
    if Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free < MIN_SHARED_MEMORY:
        free = format_bytes(shutil.disk_usage("/dev/shm").free)
        lacks.append(f"shared memory ({free} free in /dev/shm)")
        fixes.append("give the container 1 GiB of /dev/shm or more (placement.resources.sharedMemory)")
    gpus = _count_gpus()
    where = f"{gpus} GPUs" if gpus > 1 else "no second GPU: ranks would run on the CPU, for trying it out"
    if lacks:
        return [Finding("ranks", "note", f"trainer: Megatron lacks {', '.join(lacks)}; {where}", "; ".join(fixes))]
    return [Finding("ranks", "ok", f"trainer: Megatron can run; {where}")]


def _count_gpus() -> int:
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_memory() -> list[Finding]:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return [Finding("memory", "note", "cannot be read on this system")]
    limit = container_memory()
    usable = min(total, limit) if limit else total
    words = format_bytes(usable) + (" (limit of the container)" if limit and limit < total else "")
    if usable < MIN_MEMORY:
        return [Finding("memory", "warn", words, "the quickstart needs 2 GiB; a model needs its packed size and more")]
    return [Finding("memory", "ok", words)]


def check_disk() -> list[Finding]:
    free = shutil.disk_usage(Path.cwd()).free
    if free < MIN_DISK:
        return [Finding("disk", "warn", f"{format_bytes(free)} free here", "free some space, or use --out elsewhere")]
    return [Finding("disk", "ok", f"{format_bytes(free)} free here")]


def check_write_access() -> list[Finding]:
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=Path.cwd()) as probe:
            probe.write(b"orbit")
    except OSError as error:
        fix = "use --out with a folder that this user may write"
        return [Finding("write-access", "warn", f"{Path.cwd()}: {error.strerror}", fix)]
    return [Finding("write-access", "ok", str(Path.cwd()))]


def check_clock() -> list[Finding]:
    """Against the file system here: on a shared one that is the server's clock, which heartbeats rely on."""
    import tempfile

    try:
        with tempfile.NamedTemporaryFile(dir=Path.cwd()) as probe:
            skew = time.time() - Path(probe.name).stat().st_mtime
    except OSError:
        return [Finding("clock", "note", "cannot be compared: this folder cannot be written")]
    if abs(skew) > MAX_CLOCK_SKEW_SECONDS:
        return [Finding("clock", "warn", f"{skew:+.1f} s from the file system's", "synchronise the clock (NTP)")]
    return [Finding("clock", "ok", f"{skew:+.1f} s from the file system's")]


def check_store(uri: str) -> Finding:
    """Writes, reads and deletes one small object."""
    import uuid

    from orbit_runtime.storage import open_store

    key = f"orbit-doctor-{uuid.uuid4().hex}"
    started = time.monotonic()
    try:
        store = open_store(uri).with_deadline(10.0)
        store.put(key, b"orbit", create_only=True)
        same = store.get(key) == b"orbit"
        store.delete([key])
    except OrbitError as error:
        return Finding("store", "fail", error.message, error.fix)
    if not same:
        return Finding("store", "fail", "it returned other bytes than were written", "use another store")
    return Finding("store", "ok", f"{store.uri}: wrote, read and deleted in {time.monotonic() - started:.2f} s")


CHECKS: dict[str, Callable[[], list[Finding]]] = {
    "python": check_python,
    "extra-train": check_train_extra,
    "torch": check_torch,
    "driver": check_driver,
    "compilers": check_compilers,
    "extras": check_extras,
    "ranks": check_ranks,
    "memory": check_memory,
    "disk": check_disk,
    "write-access": check_write_access,
    "clock": check_clock,
}

FINDING_IDS = ("python", "extra-train", "torch", "threads", "gpu", "driver", "gpu-links", "compilers", "extras",
               "ranks", "memory", "disk", "write-access", "clock", "store")  # fmt: skip
"""Every id that a finding can have."""


def _version(name: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return NO_VERSION
