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

FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
LONGEST_COMPILATION = 120.0
"""Seconds; two on a quiet machine."""


@cache
def processor_flags() -> frozenset[str]:
    """What this processor can do, as Linux names it; empty elsewhere."""
    told = Path("/proc/cpuinfo")
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", told.read_text(), re.MULTILINE) if told.exists() else None
    return frozenset(found[1].split()) if found else frozenset()


def find_compiler() -> str | None:
    """The C compiler whose kernels run here; None elsewhere than on Linux."""
    return shutil.which(os.environ.get("CC", "cc")) if processor_flags() else None


@cache
def compiled(source: Path) -> CDLL | None:
    """The functions of a C source. None without a compiler: torch's operations take their place, whose last bits depend
    on what is computed together."""
    compiler = find_compiler()
    if compiler is None:
        return None
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    # A home folder may serve machines with other processors.
    parts = (source.read_bytes(), version, " ".join((*sorted(processor_flags()), *FLAGS)).encode())
    name = f"{source.stem}-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"
    path = default_cache(os.environ) / "kernels" / name
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                made = Path(folder, name)
                command = [compiler, *FLAGS, str(source), "-o", str(made), "-lm"]
                subprocess.run(command, capture_output=True, check=True, timeout=LONGEST_COMPILATION)
                os.replace(made, path)
        return CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None
