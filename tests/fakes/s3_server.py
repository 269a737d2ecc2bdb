"""A real S3 server (versitygw) in a process of its own, that a test may kill and start again on the same port.

Belongs here: starting and ending it. Not a fake: it keeps objects as files and honours conditional writes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

VERSITYGW_VARIABLE = "ORBIT_TEST_VERSITYGW"
ACCESS_KEY = "orbit-test"
SECRET_KEY = "orbit-test-secret"


def versitygw_path() -> Path:
    """The program that `make test-store` built; skips where it was not asked for, fails where it is missing."""
    named = os.environ.get(VERSITYGW_VARIABLE)
    if not named:
        pytest.skip(f"no S3 server: {VERSITYGW_VARIABLE} is not set; `make test-store` builds one and sets it")
    if not os.access(named, os.X_OK):
        pytest.fail(f"{VERSITYGW_VARIABLE} names {named}, which is no program")
    return Path(named)


class S3Server:
    """One server over one folder; each first-level folder is a bucket.

    Example: `server = S3Server(path, folder); server.start(); os.environ.update(server.environment())`
    """

    def __init__(self, program: Path, folder: Path) -> None:
        self.folder = folder
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])

    def start(self) -> None:
        """Returns when it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [self._program, "--access", ACCESS_KEY, "--secret", SECRET_KEY]
        command += ["--port", f"127.0.0.1:{self.port}", "posix", self.folder]
        with (self.folder.parent / f"{self.folder.name}.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            assert self._process.poll() is None, f"versitygw ended with {self._process.returncode}"
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                time.sleep(0.05)
            else:
                return
        raise AssertionError("versitygw did not answer within 20 s")

    def kill(self) -> None:
        """SIGKILL; what was answered stays on its disk."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def make_bucket(self, name: str) -> str:
        """Its URI."""
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        return f"s3://{name}"

    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to reach the server."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        }
