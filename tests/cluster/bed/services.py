"""What a cluster has besides nodes: Service addresses, names, an object store.

Belongs here: kube-proxy, CoreDNS, versitygw. Does not belong here: what monitors Orbit.
"""

from __future__ import annotations

from pathlib import Path

from cluster.bed.control_plane import ControlPlane
from cluster.bed.network import POD_RANGE, bridge_address
from cluster.bed.pki import NODES
from cluster.bed.processes import Processes
from cluster.bed.programs import find_program

ACCESS_KEY, SECRET_KEY = "orbit-test", "orbit-test-secret"
STORE_PORT = 7070


def start_proxy(processes: Processes, plane: ControlPlane) -> None:
    """One for all nodes: they share a network namespace."""
    processes.start("kube-proxy", find_program("kube-proxy"), {
        "kubeconfig": plane.kubeconfig, "hostname-override": NODES[0], "proxy-mode": "iptables",
        "cluster-cidr": POD_RANGE, "conntrack-max-per-core": 0, "conntrack-tcp-timeout-established": "0s",
        "conntrack-tcp-timeout-close-wait": "0s", "healthz-bind-address": "", "metrics-bind-address": "127.0.0.1:10249",
        # Pods of one node answer each other over the bridge, past the packet filter that would turn the address back.
        "masquerade-all": "true", "iptables-min-sync-period": "0.2s",
    })  # fmt: skip


def start_dns(processes: Processes, plane: ControlPlane, folder: Path) -> None:
    """Listens on the first node's address, which every pod's resolv.conf names."""
    corefile = folder / "Corefile"
    corefile.write_text(
        f".:53 {{\n  bind {bridge_address(0)}\n  errors\n"
        f"  kubernetes cluster.local in-addr.arpa {{\n    kubeconfig {plane.kubeconfig}\n    pods insecure\n  }}\n}}\n"
    )
    processes.start("coredns", find_program("coredns"), {"conf": corefile})


def start_store(processes: Processes, folder: Path) -> None:
    """An S3 server; each first-level folder is a bucket."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = {"access": ACCESS_KEY, "secret": SECRET_KEY, "port": f"{bridge_address(0)}:{STORE_PORT}"}
    processes.start("versitygw", find_program("versitygw"), flags, "posix", str(folder))


def store_environment() -> dict[str, str]:
    """What a pod, or a test, needs in its environment to reach the store."""
    return {
        "AWS_ENDPOINT_URL": f"http://{bridge_address(0)}:{STORE_PORT}",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    }
