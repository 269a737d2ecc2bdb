"""Processes of the bed: started with a log each, remembered on disk by id, ended by id or with the tests.

Belongs here: starting, ending, and the record from which a crashed bed is cleaned up (`cleanup`). Does not belong here:
what is started.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Flags = Mapping[str, object]
WITH_ITS_PARENT = ("setpriv", "--pdeathsig", "KILL", "--")
"""Words before a command that the kernel kills when whoever started it ends, and be it by SIGKILL.

To the kernel that is the thread which started it: servers are started by the tests' main thread.
"""


@dataclass
class Processes:
    """The processes of one bed, in the order of their start.

    Args of the class: `logs` receives a file for each; `record`, where given, their ids; `netns` is where they start.
    """

    logs: Path
    record: Path | None = None
    netns: str | None = None
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, program: str, flags: Flags | None = None, *arguments: str, **environment: str) -> None:
        """Starts `program --flag=value ... arguments`; the log is appended to when a name starts again."""
        assert name not in self.running, f"{name} runs already"
        command = [program, *(f"--{flag}={value}" for flag, value in (flags or {}).items()), *arguments]
        self.logs.mkdir(parents=True, exist_ok=True)
        with self.log(name).open("ab") as log:
            # A session of its own: Ctrl-C reaches the tests, which then end these in order.
            process = subprocess.Popen(
                [*WITH_ITS_PARENT, *inside(self.netns), *command],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, **environment},
            )  # fmt: skip
        self.running[name] = process
        _wait_until_bound(process)
        if self.record is not None:
            with self.record.open("a", encoding="utf-8") as record:
                record.write(json.dumps({"name": name, "pid": process.pid, "started": started_at(process.pid)}) + "\n")

    def stop(self, name: str, number: int = signal.SIGTERM, seconds: float = 20.0) -> None:
        """Ends one process and waits; SIGKILL when it takes longer. Fine where it has ended already."""
        self.stop_together([name], number, seconds)

    def stop_together(self, names: Iterable[str], number: int = signal.SIGTERM, seconds: float = 20.0) -> None:
        """All at once, so that they take as long as the slowest."""
        ending = [process for name in names if (process := self.running.pop(name, None)) is not None]
        for process in ending:
            process.send_signal(signal.SIGCONT)
            process.send_signal(number)
        until = time.monotonic() + seconds
        for process in ending:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def stop_all(self) -> None:
        """Nothing that they hold is needed; an API server would wait for its watchers."""
        self.stop_together(reversed([*self.running]), seconds=3.0)

    def pid(self, name: str) -> int:
        return self.running[name].pid

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def check_alive(self) -> None:
        for name, process in self.running.items():
            code = process.poll()
            assert code is None, f"{name} ended with {code}; the end of {self.log(name)}:\n{self.tail(name)}"

    def tail(self, name: str, num_lines: int = 15) -> str:
        lines = self.log(name).read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def wait_for(self, probe: Callable[[], object], what: str, seconds: float = 60.0) -> None:
        """Returns when `probe` is true; fails as soon as a process has ended."""
        until = time.monotonic() + seconds
        while not probe():
            self.check_alive()
            assert time.monotonic() < until, f"not within {seconds:.0f} s: {what}; see {self.logs}"
            time.sleep(0.1)


def _wait_until_bound(process: subprocess.Popen[bytes]) -> None:
    """Returns when `setpriv` has told the kernel and become the next program: a parent that ends sooner leaves it."""
    until = time.monotonic() + 20
    while process.poll() is None and Path(f"/proc/{process.pid}/comm").read_text() == "setpriv\n":
        assert time.monotonic() < until, f"{process.args} does not start"
        time.sleep(0.005)


def inside(netns: str | None) -> list[str]:
    """Words that start a command in a network namespace; `ip netns exec` would also hide /sys/fs/cgroup."""
    return [] if netns is None else ["nsenter", f"--net=/run/netns/{netns}", "--"]


def started_at(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: with it an id cannot be mistaken for a later process's."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])


def run(
    *command: str | Path,
    netns: str | None = None,
    stdin: str | None = None,
    seconds: float = 300.0,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Runs a command to its end; fails with what it printed."""
    words = [*inside(netns), *(str(word) for word in command)]
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=seconds, env=environment)
    assert done.returncode == 0, f"{' '.join(words)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
