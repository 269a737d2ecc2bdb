"""The network of the bed: one namespace, a cable to the machine, a bridge per node.

Everything the cluster does to a network happens inside the namespace: bridges, addresses, packet filters, port 53. The
machine sees one device and two routes, so tests reach pods and Services by their addresses, and pods the tests.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from cluster.bed.control_plane import SERVICE_RANGE
from cluster.bed.processes import run

NETNS = "orbit-bed"
NAMESPACES = Path("/run/netns")
"""Folder of `ip` for what holds a namespace open. With the first it mounts this folder onto itself."""
CABLE = "orbit-bed"
"""Name of the machine's end of the cable."""
MACHINE_ADDRESS, INNER_ADDRESS = "10.245.0.1", "10.245.0.2"
POD_RANGE = "10.244.0.0/16"


def bridge_name(index: int) -> str:
    return f"node{index}"


def bridge_address(index: int) -> str:
    """The node's address, and its pods' gateway."""
    return f"10.244.{index}.1"


def pod_subnet(index: int) -> str:
    return f"10.244.{index}.0/24"


def build_network(num_nodes: int) -> None:
    """Makes everything anew."""
    run("ip", "netns", "add", NETNS)
    run("ip", "link", "add", CABLE, "type", "veth", "peer", "name", "machine", "netns", NETNS)
    run("ip", "address", "add", f"{MACHINE_ADDRESS}/30", "dev", CABLE)
    run("ip", "link", "set", CABLE, "up")
    for words in ("link set lo up", f"address add {INNER_ADDRESS}/30 dev machine", "link set machine up",
                  f"route add default via {MACHINE_ADDRESS}"):  # fmt: skip
        run("ip", *words.split(), netns=NETNS)
    for index in range(num_nodes):
        name = bridge_name(index)
        for words in (f"link add {name} type bridge", f"address add {bridge_address(index)}/24 dev {name}",
                      f"link set {name} up"):  # fmt: skip
            run("ip", *words.split(), netns=NETNS)
    run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward", netns=NETNS)
    for addresses in (POD_RANGE, SERVICE_RANGE):
        run("ip", "route", "add", addresses, "via", INNER_ADDRESS)


def remove_network() -> None:
    """Fine where there is none. The namespace takes every device in it along, and the cable's other end."""
    for words in (["link", "del", CABLE], ["netns", "del", NETNS]):
        subprocess.run(["ip", *words], capture_output=True)


def has_network() -> bool:
    return (NAMESPACES / NETNS).exists() or Path("/sys/class/net", CABLE).exists()
