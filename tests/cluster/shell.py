"""A person at a shell in a checkout, who does what the guides say.

Belongs here: the programs and variables that a guide takes for granted, and running blocks. Does not belong here: what
is expected of their results.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml
from cluster.bed.cluster import Cluster
from cluster.bed.images import REGISTRY
from cluster.bed.programs import find_program
from cluster.bed.services import store_environment
from cluster.guide import find_block, find_inline

ROOT = Path(__file__).parents[2]
IMPATIENT = {
    # A core for eight GPUs: a node of this machine has two.
    "runs": {"cpuRequestPerGPU": 0.125},
    "operator": {"pollSeconds": 1, "progressSeconds": 1, "nodeLostSeconds": 5},
    "monitoring": {"serviceMonitor": {"interval": "2s"}, "podMonitor": {"interval": "2s"}},
}
"""Values that only shorten waiting, given to every `helm install` and `helm upgrade`; `--set` goes before."""
HELM = """#!/bin/sh
case $1 in install|upgrade) set -- "$@" --values "{values}" ;; esac
exec "{program}" "$@"
"""
ORBIT = """#!/bin/sh
PYTHONPATH="{root}" exec "{python}" -m orbit_runtime.cli.main "$@"
"""


class Shell:
    """A folder with the checkout's `charts/` and `crds/`, and a shell that stops at the first command that fails."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        for name in ("charts", "crds"):
            (folder / name).symlink_to(ROOT / name)
        programs = folder / "programs"
        programs.mkdir()
        values = folder / "impatient.yaml"
        values.write_text(yaml.safe_dump(IMPATIENT))
        (programs / "kubectl").symlink_to(find_program("kubectl"))
        _write_program(programs / "orbit", ORBIT.format(root=ROOT, python=sys.executable))
        self._programs, self._values = programs, values
        self.use_helm("helm4")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("ORBIT_", "AWS_", "KUBE"))},
            **store_environment(),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "KUBECONFIG": str(cluster.kubeconfig),
            "REGISTRY": REGISTRY,
            "HOME": str(folder),
        }

    def use_helm(self, name: str) -> None:
        """What `helm` is from now on: `helm3` or `helm4`."""
        text = HELM.format(values=self._values, program=find_program(name))
        _write_program(self._programs / "helm", text)

    def run(self, script: str, seconds: float = 540.0) -> str:
        """Everything that it prints."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], cwd=self.folder, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"exit code {done.returncode} of\n{script}\n{done.stdout}"
        return done.stdout

    def follow(self, guide: str, section: str, number: int = 0) -> str:
        """Runs a block of a guide; its files are written first."""
        self.write_files(guide, section)
        return self.run(find_block(guide, section, "sh", number).text)

    def write_files(self, guide: str, section: str, changes: Mapping[str, str] | None = None) -> None:
        """Files that a section shows. `changes` are texts that are replaced."""
        block = find_block(guide, section, "yaml") if _has_file(guide, section) else None
        if block is None or block.file is None:
            return
        text = block.text
        for old, new in (changes or {}).items():
            assert old in text, f"{guide}.md, {section}: no {old}"
            text = text.replace(old, new)
        (self.folder / block.file).write_text(text)

    def say(self, guide: str, command: str, **names: str) -> str:
        """Runs a command that stands in running text, with its NAMES in capitals replaced."""
        assert command in find_inline(guide), f"{guide}.md does not say `{command}`"
        for name, value in names.items():
            assert name in command, command
            command = command.replace(name, value)
        return self.run(command)

    @contextmanager
    def meanwhile(self, guide: str, section: str, number: int = 0) -> Iterator[None]:
        """A block runs while the caller does something else; leaving waits for it, and fails where it failed."""
        failures: list[BaseException] = []

        def follow() -> None:
            try:
                self.follow(guide, section, number)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=follow)
        thread.start()
        try:
            yield
        finally:
            thread.join()
        if failures:
            raise failures[0]


def _has_file(guide: str, section: str) -> bool:
    from cluster.guide import read_blocks

    return any(block.section == section and block.language == "yaml" for block in read_blocks(guide))


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
