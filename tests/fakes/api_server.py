"""A real Kubernetes API server over a real etcd, and nothing else: no controller, scheduler or node.

Belongs here: starting and ending the two. Not a fake: it validates, defaults and stores as any cluster does.
"""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import time
from pathlib import Path

import httpx
import pytest

PROGRAMS_VARIABLE = "ORBIT_TEST_KUBERNETES"
TOKEN = "orbit-test-admin"


def programs_folder() -> Path:
    """The folder with `etcd` and `kube-apiserver`; skips where it was not asked for, fails where one is missing."""
    named = os.environ.get(PROGRAMS_VARIABLE)
    if not named:
        pytest.skip(
            f"no Kubernetes: {PROGRAMS_VARIABLE} is not set; `make test-cluster` builds the programs and sets it"
        )
    missing = [name for name in ("etcd", "kube-apiserver") if not os.access(Path(named, name), os.X_OK)]
    if missing:
        pytest.fail(f"{PROGRAMS_VARIABLE} names {named}, which has no {' and no '.join(missing)}")
    return Path(named)


class ApiServer:
    """One API server, on ports of its own.

    Example: `server = ApiServer(programs_folder(), tmp_path); server.start(); server.client().get("/version")`
    """

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self._folder = programs, folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._etcd_port, self._peer_port, self.port = (_free_port() for _ in range(3))
        self.url = f"https://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when it is ready."""
        (self._folder / "pki").mkdir(parents=True)
        (self._folder / "tokens.csv").write_text(f'{TOKEN},admin,admin,"system:masters"\n')
        key = self._folder / "service-accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        etcd, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{self._peer_port}"
        self._run("etcd", {
            "data-dir": self._folder / "etcd", "listen-client-urls": etcd, "advertise-client-urls": etcd,
            "listen-peer-urls": peer, "initial-advertise-peer-urls": peer, "initial-cluster": f"default={peer}",
            "unsafe-no-fsync": "true",
        })  # fmt: skip
        self._run("kube-apiserver", {
            "etcd-servers": etcd, "bind-address": "127.0.0.1", "secure-port": self.port,
            "cert-dir": self._folder / "pki", "token-auth-file": self._folder / "tokens.csv",
            "authorization-mode": "RBAC", "service-cluster-ip-range": "10.96.0.0/16",
            "service-account-issuer": "https://kubernetes.default.svc", "service-account-key-file": key,
            "service-account-signing-key-file": key,
        })  # fmt: skip
        until = time.monotonic() + 60
        while not self._is_ready():
            for process in self._processes:
                assert process.poll() is None, f"{process.args} ended with {process.returncode}; see {self._folder}"
            assert time.monotonic() < until, f"the API server is not ready after a minute; see {self._folder}"
            time.sleep(0.1)

    def client(self) -> httpx.Client:
        """With every right."""
        trusted = ssl.create_default_context(cafile=self._folder / "pki" / "apiserver.crt")
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return httpx.Client(base_url=self.url, headers=headers, verify=trusted, trust_env=False, timeout=30)

    def stop(self) -> None:
        """Both processes, the API server first."""
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def _run(self, program: str, flags: dict[str, object]) -> None:
        command = [str(self._programs / program), *(f"--{name}={value}" for name, value in flags.items())]
        with (self._folder / f"{program}.log").open("ab") as log:
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log))

    def _is_ready(self) -> bool:
        if not (self._folder / "pki" / "apiserver.crt").is_file():
            return False
        try:
            with self.client() as client:
                return client.get("/readyz").status_code == 200
        except (httpx.HTTPError, ssl.SSLError):
            return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
