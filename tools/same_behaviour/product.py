"""A checkout of the product, and its command line.

Belongs here: starting commands of a checkout, and their output without what no two runs share. Does not belong here:
which commands (`texts`, `runs`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CHILD = Path(__file__).with_name("child.py")
ENVIRONMENT = {
    "COLUMNS": "120", "HF_HUB_OFFLINE": "1", "MKL_NUM_THREADS": "1", "NO_COLOR": "1", "OMP_NUM_THREADS": "1",
    "TERM": "dumb", "TOKENIZERS_PARALLELISM": "false", "TZ": "UTC",
}  # fmt: skip
SECONDS = 600.0
"""Of one command, at most."""
CHANGING = (
    (re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+Z ", re.MULTILINE), ""),
    (re.compile(r"\b(127\.0\.0\.1|localhost):\d+"), r"\1:PORT"),
    (re.compile(r"\b\d[\d,]*(\.\d+)? (tokens/s|s|ms|seconds|minutes)\b"), r"# \2"),
    (re.compile(r"\bpid \d+"), "pid #"),
)
"""What no two runs share, and what stands there instead."""


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    error: str


class Product:
    """One checkout, with a folder for what its commands write."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self.root = root.resolve()
        self.scratch = scratch.resolve()
        self._launchers: dict[str, subprocess.Popen[str]] = {}

    @property
    def environment(self) -> dict[str, str]:
        known = {name: value for name, value in os.environ.items() if not name.startswith("ORBIT_")}
        path = os.pathsep.join(map(str, (self.root, self.root / "operator", self.root / "tests")))
        return {**known, **ENVIRONMENT, "PYTHONPATH": path, "ORBIT_CACHE": str(self.scratch / "cache")}

    @property
    def examples(self) -> list[str]:
        """Paths from the root."""
        return sorted(path.relative_to(self.root).as_posix() for path in (self.root / "examples").glob("*.yaml"))

    def start(self, argv: Sequence[str], *, kind: str, folder: Path | None = None, name: str = "command") -> int:
        """Pid of a command that was just started.

        Args:
            kind: `light` for a command that never imports torch.
            folder: where it is started; None: at the root.
            name: of its output.
        """
        out, error = self._outputs(name)
        job = {"argv": list(argv), "folder": str(folder or self.root), "out": str(out), "error": str(error)}
        return int(self._ask(kind, job)["pid"] or 0)

    def wait(self, pid: int, *, kind: str, name: str = "command") -> Ended:
        until = time.monotonic() + SECONDS
        while (code := self.poll(pid, kind=kind)) is None:
            if time.monotonic() > until:
                os.kill(pid, 9)
            time.sleep(0.002)
        out, error = self._outputs(name)
        return Ended(code, self.clean(out.read_text()), self.clean(error.read_text()))

    def poll(self, pid: int, *, kind: str) -> int | None:
        """Exit code of a command; None while it goes on."""
        return self._ask(kind, {"poll": pid})["code"]

    def orbit(self, *argv: str, kind: str = "light", folder: Path | None = None) -> Ended:
        return self.wait(self.start(argv, kind=kind, folder=folder), kind=kind)

    def python(self, source: str, *arguments: str) -> str:
        """What a program prints that imports this checkout's own modules, its tests among them."""
        command = [sys.executable, "-c", source, *arguments]
        environment = {
            **self.environment,
            "PYTHONPATH": f"{self.environment['PYTHONPATH']}{os.pathsep}{self.root / 'tests'}",
        }
        ended = subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise RuntimeError(f"{self.root}: {ended.stderr[-2000:]}")
        return self.clean(ended.stdout)

    def clean(self, text: str) -> str:
        """Without what no two runs or machines share."""
        for path, name in ((sys.executable, "PYTHON"), (self.scratch, "SCRATCH"), (self.root, "ORBIT")):
            text = text.replace(str(path), name)
        for pattern, instead in CHANGING:
            text = pattern.sub(instead, text)
        return text

    def close(self) -> None:
        for launcher in self._launchers.values():
            assert launcher.stdin is not None
            launcher.stdin.close()
            launcher.wait(timeout=60)

    def _outputs(self, name: str) -> tuple[Path, Path]:
        return self.scratch / f"{name}.out", self.scratch / f"{name}.error"

    def _ask(self, kind: str, message: Mapping[str, object]) -> dict[str, int | None]:
        if kind not in self._launchers:
            command = [sys.executable, "-P", str(CHILD), kind]
            self._launchers[kind] = subprocess.Popen(
                command, cwd=self.root, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self._answer(kind)
        launcher = self._launchers[kind]
        assert launcher.stdin is not None
        launcher.stdin.write(json.dumps(message) + "\n")
        launcher.stdin.flush()
        return self._answer(kind)

    def _answer(self, kind: str) -> dict[str, int | None]:
        launcher = self._launchers[kind]
        assert launcher.stdout is not None
        line = launcher.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that starts commands of {self.root} died")
        answer: dict[str, int | None] = json.loads(line)
        return answer


@contextmanager
def worktree(root: Path, commit: str, folder: Path) -> Iterator[Path]:
    """A checkout of another commit, for a while."""
    git = ["git", "-C", str(root)]
    subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(folder), commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "worktree", "remove", "--force", str(folder)], check=True)
