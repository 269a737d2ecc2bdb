"""etcd, API server, controller manager and scheduler.

Belongs here: their flags, start, stop and readiness. Does not belong here: nodes (`node`) and networks (`network`).
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path

import httpx
from cluster.bed.pki import ADMIN_TOKEN, build_pki, write_kubeconfig
from cluster.bed.processes import Processes
from cluster.bed.programs import find_program
from fakes.ports import free_port

SERVICE_RANGE = "10.96.0.0/16"
SERVICE_ADDRESS = "10.96.0.1"


class ControlPlane:
    """One control plane at `address`.

    Without a scheduler nothing places pods: tests that move pods by hand, and tests of schemas, want it so.

    Example: `plane = ControlPlane(Processes(folder / "logs"), folder); plane.start(); plane.client().get("/version")`
    """

    def __init__(
        self,
        processes: Processes,
        folder: Path,
        address: str = "127.0.0.1",
        port: int = 0,
        *,
        schedules: bool = False,
        flags: Mapping[str, object] | None = None,
    ) -> None:
        """`flags` are added to the controller manager's."""
        self.processes, self.folder, self.address = processes, folder, address
        self._etcd_port, self._peer_port = free_port(), free_port()
        self.port = port or free_port()
        self.url = f"https://{address}:{self.port}"
        self.kubeconfig = folder / "kubeconfig"
        self._schedules, self._flags = schedules, dict(flags or {})

    def start(self) -> None:
        """Returns when the API server is ready."""
        self.pki = build_pki(self.folder / "pki", sorted({"127.0.0.1", self.address, SERVICE_ADDRESS}))
        write_kubeconfig(self.kubeconfig, self.url, self.pki, ADMIN_TOKEN)
        etcd, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{self._peer_port}"
        self.processes.start("etcd", find_program("etcd"), {
            "data-dir": self.folder / "etcd", "listen-client-urls": etcd, "advertise-client-urls": etcd,
            "listen-peer-urls": peer, "initial-advertise-peer-urls": peer, "initial-cluster": f"default={peer}",
            "unsafe-no-fsync": "true",
        })  # fmt: skip
        self.start_api_server()
        self.processes.start("kube-controller-manager", find_program("kube-controller-manager"), {
            "kubeconfig": self.kubeconfig, "service-account-private-key-file": self.pki.accounts_key,
            "root-ca-file": self.pki.authority, "use-service-account-credentials": "true", "leader-elect": "false",
            # A node that says nothing is NotReady after 16 s (40 s in most clusters).
            "node-monitor-period": "2s", "node-monitor-grace-period": "16s", "bind-address": "127.0.0.1",
            "secure-port": free_port(), "concurrent-job-syncs": 10,
            # By default it asks at most 20 times a second: tests that start runs by the dozen would wait for it.
            "kube-api-qps": 200, "kube-api-burst": 400, **self._flags,
        })  # fmt: skip
        if self._schedules:
            flags = {"kubeconfig": self.kubeconfig, "leader-elect": "false", "bind-address": "127.0.0.1",
                     "secure-port": free_port()}  # fmt: skip
            self.processes.start("kube-scheduler", find_program("kube-scheduler"), flags)

    def start_api_server(self) -> None:
        """Also after `stop_api_server`: on the same port, over the same etcd."""
        self.processes.start("kube-apiserver", find_program("kube-apiserver"), {
            "etcd-servers": f"http://127.0.0.1:{self._etcd_port}", "bind-address": "0.0.0.0",
            "advertise-address": self.address, "secure-port": self.port,
            "tls-cert-file": self.pki.certificate, "tls-private-key-file": self.pki.key,
            "cert-dir": self.folder / "pki", "token-auth-file": self.pki.tokens, "authorization-mode": "Node,RBAC",
            "service-cluster-ip-range": SERVICE_RANGE, "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": self.pki.accounts_key, "allow-privileged": "true",
            "service-account-signing-key-file": self.pki.accounts_key,
            "kubelet-preferred-address-types": "InternalIP",
            # Who answers for a part of the API, such as Kueue, believes what this server says of a caller.
            "requestheader-client-ca-file": self.pki.authority, "requestheader-username-headers": "X-Remote-User",
            "requestheader-group-headers": "X-Remote-Group", "requestheader-extra-headers-prefix": "X-Remote-Extra-",
            "proxy-client-cert-file": self.pki.certificate, "proxy-client-key-file": self.pki.key,
            # Loopback is no address for the `kubernetes` Service to have.
            **({"endpoint-reconciler-type": "none"} if self.address.startswith("127.") else {}),
        })  # fmt: skip
        self.processes.wait_for(self.is_ready, "the API server is ready", 180)

    def stop_api_server(self) -> None:
        """Stops the API server as a restart would: watchers lose the connection, and requests get no answer."""
        self.processes.stop("kube-apiserver", seconds=5)

    def client(self) -> httpx.Client:
        """With every right."""
        trusted = ssl.create_default_context(cafile=self.pki.authority)
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
        return httpx.Client(base_url=self.url, headers=headers, verify=trusted, trust_env=False, timeout=30)

    def is_ready(self) -> bool:
        try:
            with self.client() as client:
                return client.get("/readyz").status_code == 200
        except httpx.HTTPError:
            return False
