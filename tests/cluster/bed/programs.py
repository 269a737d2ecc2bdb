"""Finds the programs of the bed, and builds none: `make test-cluster` builds them and says where they are."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path

import pytest

FOLDERS = "ORBIT_TEST_PROGRAMS"
"""Folders with the programs, separated as in PATH; `tools/cluster_programs.sh` prints one."""
KUBERNETES = "v1.34.1"


@cache
def find_program(name: str) -> str:
    """Its path. Skips where the cluster tests were not asked for, fails where one program is missing."""
    if FOLDERS not in os.environ:
        pytest.skip(f"no Kubernetes: {FOLDERS} is not set; `make test-cluster` builds the programs and sets it")
    found = shutil.which(name, path=os.environ[FOLDERS]) or shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin")
    if found is None:
        pytest.fail(f"{name} is neither in the folders of {FOLDERS} nor a program of this machine", pytrace=False)
    return found


def check_machine() -> None:
    """Skips where no node can run."""
    if os.geteuid() != 0:
        pytest.skip("a Kubernetes node needs root: it starts containers and network devices")
    if not Path("/sys/fs/cgroup").is_dir():
        pytest.skip("a Kubernetes node needs control groups in /sys/fs/cgroup")
