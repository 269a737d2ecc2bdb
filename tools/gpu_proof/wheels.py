"""`make gpu-wheels`: gathers what a machine with torch lacks for the proof, as wheels in one small folder.

    python -m tools.gpu_proof.wheels [--python 3.12] [--machine x86_64] [FOLDER]

What torch brings is never gathered: the machine has it, and it has gigabytes. Versions are those of this environment,
which `make dev` took from images/constraints. transformers is small enough to travel, and is installed there only where
the machine has none, or one that pyproject.toml does not allow.

Belongs here: which packages, and getting them. Does not belong here: installing them (`tools/gpu_proof.sh`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "wheels" / "gpu"
LIMIT = 60 << 20
"""Bytes of the archive and of all tracked files: a borrowed machine may take 64 MiB."""
TRACKED_LIMIT = 22 << 20
"""Bytes of the tracked files alone, held by a test: what is left is the archive's."""
FROM_THE_MACHINE = {"torch", "triton", "numpy", "pyarrow"}
"""Never gathered. pyarrow reads prompts in Parquet, which no stage has."""
TESTS = {"pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "packaging"}
PEERS = {"peft", "trl"}
"""What a step is compared with. TRL needs datasets, and that the machine's pandas and pyarrow."""
PEERS_NEED_THERE = {"pandas", "pyarrow"}
REQUIREMENTS, PEER_REQUIREMENTS = "requirements.txt", "requirements-peers.txt"
MANYLINUX = (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
"""Minor versions of glibc that wheels are named after; pip asks for each by its exact name."""


def requirements() -> tuple[list[Requirement], list[Requirement]]:
    """From pyproject.toml: what the stages need, and what they compare with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    named = [Requirement(line) for line in (*project["dependencies"], *extras["train"])]
    needed = {each.name: each for each in named if each.name not in FROM_THE_MACHINE}
    development = {each.name: each for each in map(Requirement, extras["dev"])}
    needed |= {name: development[name] for name in sorted(TESTS)}
    return list(needed.values()), [development[name] for name in sorted(PEERS)]


def closure(wanted: Iterable[Requirement], environment: Mapping[str, str], leave: set[str]) -> dict[str, str]:
    """Package → version here, of these and of all that they need where the proof will run; nothing in `leave`."""
    found: dict[str, str] = {}
    left = list(wanted)
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        extras = ("", *requirement.extras)
        if name in leave or name in found:
            continue
        installed = distribution(name)
        found[name] = installed.version
        left += [
            each
            for each in map(Requirement, installed.requires or ())
            if each.marker is None or any(each.marker.evaluate({**environment, "extra": extra}) for extra in extras)
        ]
    return found


def packages(python: str, machine: str) -> dict[str, str]:
    """Package → version of every wheel to gather."""
    there: dict[str, Any] = {
        **default_environment(), "python_version": python, "python_full_version": f"{python}.0",
        "platform_machine": machine, "sys_platform": "linux", "platform_system": "Linux",
    }  # fmt: skip
    brought = closure([Requirement("torch")], there, set())
    needed, peers = requirements()
    # pip itself is no part of a fresh environment: it is run from its wheel.
    return closure([*needed, *peers, Requirement("pip")], there, {*brought, *FROM_THE_MACHINE, *PEERS_NEED_THERE})


def gather(folder: Path, python: str, machine: str) -> int:
    """Bytes of the folder, which holds nothing else afterwards. Raises CalledProcessError with pip's words told."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in MANYLINUX]
    platforms += [f"--platform=manylinux{name}_{machine}" for name in ("2014", "2010", "1")]
    wanted = [f"{name}=={version}" for name, version in sorted(packages(python, machine).items())]
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms,
        f"--dest={folder}", *wanted,
    ]  # fmt: skip
    subprocess.run(command, check=True)
    needed, peers = requirements()
    for name, lines in ((REQUIREMENTS, needed), (PEER_REQUIREMENTS, peers)):
        (folder / name).write_text("".join(f"{each}\n" for each in lines), encoding="utf-8")
    return sum(path.stat().st_size for path in folder.iterdir())


def pack(folder: Path) -> Path:
    """One archive of the folder. Its wheels lose their own compression, so that what is alike in several of them is
    compressed together."""
    archive = folder.with_suffix(".tar.xz")
    with tarfile.open(archive, "w:xz", preset=9) as packed, tempfile.TemporaryDirectory() as scratch:
        for path in sorted(folder.iterdir()):
            loose = Path(scratch, path.name)
            if path.suffix == ".whl":
                with ZipFile(path) as wheel, ZipFile(loose, "w", ZIP_STORED) as stored:
                    for each in wheel.infolist():
                        stored.writestr(each, wheel.read(each), ZIP_STORED)
            else:
                loose.write_bytes(path.read_bytes())
            packed.add(loose, path.name)
    return archive


def tracked_bytes() -> int:
    """Of the files that git tracks here, as they lie; 0 without git."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return sum((ROOT / name).stat().st_size for name in listed.split("\0") if name and (ROOT / name).is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    parser.add_argument("--python", default="3.12", help="version of the Python that has torch there")
    parser.add_argument("--machine", default="x86_64", choices=("x86_64", "aarch64"))
    options = parser.parse_args()
    try:
        size = gather(options.folder, options.python, options.machine)
    except subprocess.CalledProcessError as error:
        print(f"pip could not get the wheels (exit status {error.returncode}); see above", file=sys.stderr)
        return 1
    print(f"{options.folder}: {len(list(options.folder.glob('*.whl')))} wheels, {size / 2**20:.1f} MiB")
    archive, tracked = pack(options.folder), tracked_bytes()
    size = archive.stat().st_size
    print(f"{archive}: {size / 2**20:.1f} MiB; files of the checkout: {tracked / 2**20:.1f} MiB")
    if size + tracked > LIMIT:
        print(f"together more than {LIMIT >> 20} MiB: too much to take along", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
