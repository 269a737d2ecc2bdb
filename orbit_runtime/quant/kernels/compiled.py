"""Kernels for CPUs: C sources beside the code, compiled when a machine first uses them.

Belongs here: compiling and loading. Does not belong here: what a kernel computes, who calls it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from ctypes import CDLL
from functools import cache
from pathlib import Path

from orbit_runtime.storage.cache import default_cache

HEADER = Path(__file__).with_name("vectors.h")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
LONGEST_COMPILATION = 120.0
"""Seconds; one on a quiet machine."""


def of_processor(names: str) -> str:
    """What Linux reports of the first processor under one of these names, joined by `|`; empty if nothing."""
    told = Path("/proc/cpuinfo")
    found = re.search(rf"^(?:{names})\s*:(.*)$", told.read_text(), re.MULTILINE) if told.exists() else None
    return found[1].strip() if found else ""


@cache
def processor_flags() -> frozenset[str]:
    """What this processor can do, as Linux names it; empty elsewhere."""
    return frozenset(of_processor("flags|Features").split())


def find_compiler() -> str | None:
    """The C compiler whose kernels run here; None elsewhere than on Linux."""
    return shutil.which(os.environ.get("CC", "cc")) if processor_flags() else None


@cache
def compiler_version() -> str:
    """What the C compiler says of itself; empty without one."""
    found = find_compiler()
    return subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout if found else ""


@cache
def compiled(source: Path) -> CDLL | None:
    """The functions of a C source. None without a compiler: torch's operations take their place, whose last bits depend
    on what is computed together."""
    compiler = find_compiler()
    if compiler is None:
        return None
    # A home folder may serve machines with other processors.
    parts = source.read_text(), HEADER.read_text(), compiler_version(), *sorted(processor_flags()), *FLAGS
    name = f"{source.stem}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}.so"
    path = default_cache(os.environ) / "kernels" / name
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                made = Path(folder, name)
                command = [compiler, *FLAGS, f"-I{HEADER.parent}", str(source), "-o", str(made), "-lm"]
                subprocess.run(command, capture_output=True, check=True, timeout=LONGEST_COMPILATION)
                os.replace(made, path)
        return CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None
