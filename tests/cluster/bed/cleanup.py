"""Nothing of a bed stays behind: what there is of one, and its removal, also after the tests were killed.

Belongs here: finding leftovers by the bed's own names and by its record of process ids. Does not belong here: the
orderly end (`cluster`), which calls this at its end as well.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

from cluster.bed.network import NAMESPACES, has_network, remove_network
from cluster.bed.node import CGROUP_PREFIX, CGROUPS
from cluster.bed.processes import run, started_at

FOLDER = Path("/var/lib/orbit-bed")
RECORD = FOLDER / "processes.jsonl"
POD_LOG_LINKS = Path("/var/log/containers")
KUBELET_FOLDER = Path("/var/lib/kubelet")
"""The kubelet keeps sockets of device plug-ins here, whatever its own folder is."""


def list_leftovers() -> list[str]:
    """One line for each process, mount, control group, network device and folder of a bed."""
    found = [f"process {pid}: {_command(pid)}" for pid in _processes()]
    found += [f"mount {path}" for path in _mounts()]
    found += [f"control group {path}" for path in _cgroups()]
    found += ["network namespace or device orbit-bed"] if has_network() else []
    found += [f"folder {FOLDER}"] if FOLDER.exists() else []
    return found


def remove_leftovers() -> None:
    """Everything that `list_leftovers` lists; fine where that is nothing."""
    until = time.monotonic() + 20
    while pids := _processes():
        assert time.monotonic() < until, f"these do not end: {[_command(pid) for pid in pids]}"
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)
    remove_network()
    for path in _mounts():
        run("umount", "--lazy", path)
    for path in _cgroups():
        _remove_cgroup(path)
    shutil.rmtree(FOLDER, ignore_errors=True)
    for link in POD_LOG_LINKS.glob("*.log"):
        if link.is_symlink() and str(FOLDER) in os.readlink(link):
            link.unlink()
    _remove_if_empty(POD_LOG_LINKS)
    if not (KUBELET_FOLDER / "config.yaml").exists() and not (KUBELET_FOLDER / "pods").exists():
        shutil.rmtree(KUBELET_FOLDER, ignore_errors=True)


def _processes() -> list[int]:
    """Recorded ones that still are the recorded ones; those in the bed's control groups; containerd's shims."""
    pids = set()
    if RECORD.exists():
        for line in RECORD.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if entry["started"] is not None and started_at(entry["pid"]) == entry["started"]:
                pids.add(entry["pid"])
    for path in _cgroups():
        try:
            pids |= {int(pid) for pid in (path / "cgroup.procs").read_text().split()}
        except OSError:
            continue  # It went away meanwhile.
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and f"{FOLDER}/" in (command := _command(int(entry.name))) and "shim" in command:
            pids.add(int(entry.name))
    return sorted(pid for pid in pids if not has_ended(pid))


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def has_ended(pid: int) -> bool:
    """Also where its parent has not looked at it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _mounts() -> list[str]:
    """The innermost first. The folder of namespaces counts once nobody has one: `ip` mounts it again for the next."""
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    paths = [line.split()[4] for line in reversed(lines)]
    ours = [path for path in paths if path.startswith(f"{FOLDER}/")]
    return ours + [path for path in paths if path == str(NAMESPACES) and _is_empty(NAMESPACES)]


def _cgroups() -> list[Path]:
    """The innermost first."""
    tops = [*CGROUPS.glob(f"{CGROUP_PREFIX}*"), *CGROUPS.glob(f"*/{CGROUP_PREFIX}*")]
    tops = [top for top in tops if not top.parent.is_symlink()]
    inner = (path for top in tops for path in top.rglob("*") if path.is_dir())
    return sorted([*tops, *inner], key=lambda path: -len(path.parts))


def _remove_cgroup(path: Path) -> None:
    for _ in range(50):
        try:
            path.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.1)  # The kernel lets a killed process go a moment later.
        else:
            return
    raise AssertionError(f"{path} cannot be removed: {(path / 'cgroup.procs').read_text()!r}")


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _remove_if_empty(folder: Path) -> None:
    if _is_empty(folder):
        folder.rmdir()
