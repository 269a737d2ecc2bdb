"""Trainer, inference and orchestrator on machines of their own: each has a network and a disk that no other sees, and
one address on a network between them.

Linux makes such a machine of a network and a mount namespace. Nothing but HTTP joins them: the run folder is an empty
one for the other two.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from orbit_runtime.storage import open_store
from tests.integration.killing import small_manifest, timeless_rows

ROOT = Path(__file__).parents[2]
KINDS = ("orchestrator", "trainer", "inference")
SUBNET, PORT = "10.213.77", 8100
SECONDS = 300.0
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
TOKEN = "of-three-machines"

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


class Machine:
    """Processes started here see only its own network, and its own disk at one path."""

    def __init__(self, kind: str, number: int, disk: Path, logs: Path) -> None:
        self.name, self.address = f"orbit-{os.getpid()}-{number}", f"{SUBNET}.{10 + number}"
        self._kind, self._number, self._disk, self._log = kind, number, disk, logs / f"{kind}.log"
        self._processes: list[subprocess.Popen[bytes]] = []

    def join(self, bridge: str) -> None:
        outside, inside = f"ov{os.getpid() % 100000}-{self._number}", "eth0"
        ip("netns", "add", self.name)
        ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", self.name)
        ip("link", "set", outside, "master", bridge, "up")
        ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", inside)
        for device in ("lo", inside):
            ip("-n", self.name, "link", "set", device, "up")

    def start(self, manifest: dict, *arguments: str) -> subprocess.Popen[bytes]:
        """`orbit <kind> MANIFEST ARGUMENTS`, with the manifest on this machine's own disk."""
        script = 'mount -t tmpfs own "$TMPDIR" && printf %s "$MANIFEST" > "$TMPDIR/run.json" && exec "$@"'
        command = [sys.executable, "-m", "orbit_runtime.cli.main", self._kind, f"{self._disk}/run.json", *arguments]
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "MANIFEST": json.dumps(manifest), "ORBIT_SERVICE_TOKEN": TOKEN,
            "TMPDIR": str(self._disk), "XDG_CACHE_HOME": str(self._disk), **THREADS,
        }  # fmt: skip
        apart = ["ip", "netns", "exec", self.name, "unshare", "--mount", "--propagation", "private", "sh", "-c", script]
        with self._log.open("ab") as log:
            process = subprocess.Popen([*apart, "sh", *command], env=environment, stdout=log, stderr=log, cwd="/")
        self._processes.append(process)
        return process

    @property
    def said(self) -> str:
        return self._log.read_text()

    def leave(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        subprocess.run(["ip", "netns", "delete", self.name], check=False, capture_output=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, Machine]]:
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare"))):
        pytest.skip("namespaces of their own need root, iproute2 and util-linux")
    bridge = f"orbit{os.getpid() % 1000000}"
    # The orchestrator's disk covers less, so that the test can read the run folder beside it.
    disks = dict.fromkeys(KINDS, tmp_path / "shared") | {"orchestrator": tmp_path / "shared" / "own"}
    disks["orchestrator"].mkdir(parents=True)
    made = {kind: Machine(kind, number, disks[kind], tmp_path) for number, kind in enumerate(KINDS)}
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "set", bridge, "up")
        for machine in made.values():
            machine.join(bridge)
        yield made
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine may hold no networks of their own: {error.stderr.decode().strip()}")
    finally:
        for machine in made.values():
            machine.leave()
        subprocess.run(["ip", "link", "delete", bridge], check=False, capture_output=True)


def addresses(machines: dict[str, Machine]) -> Sequence[str]:
    return [part for kind in KINDS[1:] for part in (f"--{kind}", f"http://{machines[kind].address}:{PORT}")]


def test_three_machines_have_the_bits_of_one_process_and_one_that_is_lost_may_come_back(
    machines: dict[str, Machine], tmp_path: Path
) -> None:
    asked, out = small_manifest(steps=6), tmp_path / "shared" / "run"
    sides = {kind: machines[kind].start(asked, "--listen", f"{machines[kind].address}:{PORT}") for kind in KINDS[1:]}
    main = machines["orchestrator"].start(asked, *addresses(machines), "--out", str(out))
    until = time.monotonic() + SECONDS
    while not (out / "metrics" / "step-000002.json").exists():
        assert main.poll() is None, machines["orchestrator"].said[-3000:]
        assert time.monotonic() < until, {kind: each.said[-1000:] for kind, each in machines.items()}
        time.sleep(0.05)
    for side in sides.values():
        assert not Path(f"/proc/{side.pid}/root{out}").exists(), "the run folder is on the orchestrator's disk alone"
    sides["trainer"].kill()
    sides["trainer"].wait()
    machines["trainer"].start(asked, "--listen", f"{machines['trainer'].address}:{PORT}")
    assert main.wait(SECONDS) == 0, machines["orchestrator"].said[-3000:]
    report = json.loads((out / "report.json").read_text())
    assert report["publishes"] == report["publishes_proven"]
    one = tmp_path / "one"
    command = [sys.executable, "-m", "orbit_runtime.cli.main", "run", str(tmp_path / "one.json"), "--out", str(one)]
    (tmp_path / "one.json").write_text(json.dumps(asked))
    environment = {**os.environ, **THREADS, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert timeless_rows(open_store(str(out))) == timeless_rows(open_store(str(one)))
    assert report["adapter_digest"] == json.loads((one / "report.json").read_text())["adapter_digest"]
