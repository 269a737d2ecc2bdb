"""One node: a containerd and a kubelet with folders, control groups, pod addresses and ports of their own.

Belongs here: their configuration, start, loss and return, images. Does not belong here: what is placed on the node.
"""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path

import yaml
from cluster.bed.control_plane import ControlPlane
from cluster.bed.heavy import build_container_spec
from cluster.bed.network import NETNS, bridge_address, bridge_name, pod_subnet
from cluster.bed.pki import NODES, PLAIN_NODE, node_token, write_kubeconfig
from cluster.bed.processes import Processes, run
from cluster.bed.programs import find_program

CGROUPS = Path("/sys/fs/cgroup")
CGROUP_PREFIX = "orbit-bed-"
PAUSE_IMAGE = "localhost/pause:1"
NUM_GPUS, GPU_PRODUCT = 8, "NVIDIA-B200"
PLAIN_TAINT = "example.com/without-gpus=:NoSchedule"
"""Whoever does not ask for that node does not get there: its images are its own."""
CPU_SHARES = 2048
"""Of a node, where a thread outside has 1024: pods must not wait for the tests beside them, which are nice, and must
not keep the API server from answering while several of them start."""


@dataclass
class Node:
    """Node number `index`. Its pods live on when the kubelet is frozen or killed, as where a network is lost."""

    index: int
    folder: Path
    plane: ControlPlane
    processes: Processes

    @property
    def name(self) -> str:
        return NODES[self.index]

    @property
    def has_gpus(self) -> bool:
        return self.name != PLAIN_NODE

    @property
    def socket(self) -> Path:
        return self.folder / "containerd.sock"

    @property
    def kubelet(self) -> str:
        return f"kubelet-{self.index}"

    @property
    def containerd(self) -> str:
        return f"containerd-{self.index}"

    def start(self) -> None:
        """Starts both; the node is Ready some seconds later."""
        mount_memory(self.folder)
        make_cgroup(f"{CGROUP_PREFIX}{self.index}")
        (self.folder / "containerd.toml").write_text(self._containerd_config())
        (self.folder / "container.json").write_text(json.dumps(build_container_spec(self.folder)))
        cni = self.folder / "cni"
        cni.mkdir()
        (cni / "10-bridge.conflist").write_text(json.dumps(self._cni_config()))
        self.processes.start(self.containerd, find_program("containerd"), {"config": self.folder / "containerd.toml"})
        self.processes.wait_for(self._answers, f"{self.containerd} answers")
        self.start_kubelet()

    def start_kubelet(self) -> None:
        kubeconfig = write_kubeconfig(self.folder / "kubeconfig", self.plane.url, self.plane.pki, node_token(self.name))
        config = self.folder / "kubelet.yaml"
        config.write_text(yaml.safe_dump(self._kubelet_config()))
        self.processes.start(self.kubelet, find_program("kubelet"), {
            "config": config, "kubeconfig": kubeconfig, "hostname-override": self.name,
            "root-dir": self.folder / "kubelet", "cert-dir": self.folder / "kubelet-pki",
            "node-ip": bridge_address(self.index),
        })  # fmt: skip

    def freeze(self) -> None:
        """The node is lost: its kubelet says nothing more, its containers go on."""
        self.processes.running[self.kubelet].send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """The node is back."""
        self.processes.running[self.kubelet].send_signal(signal.SIGCONT)

    def import_image(self, archive: Path) -> None:
        self.ctr("images", "import", str(archive))

    def ctr(self, *words: str) -> str:
        return run(find_program("ctr"), "--address", self.socket, "--namespace", "k8s.io", *words, netns=NETNS)

    def _answers(self) -> bool:
        try:
            self.ctr("version")
        except AssertionError:
            return False
        return True

    def _containerd_config(self) -> str:
        return f"""version = 2
root = "{self.folder}/containerd"
state = "{self.folder}/run"
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.internal.v1.opt", "io.containerd.tracing.processor.v1.otlp"]
[grpc]
  address = "{self.socket}"
[ttrpc]
  address = "{self.socket}.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  netns_mounts_under_state_dir = true
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{self.folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      base_runtime_spec = "{self.folder}/container.json"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""  # noqa: E501

    def _cni_config(self) -> dict[str, object]:
        ipam = {"type": "host-local", "subnet": pod_subnet(self.index), "dataDir": str(self.folder / "addresses"),
                "routes": [{"dst": "0.0.0.0/0"}]}  # fmt: skip
        bridge = {"type": "bridge", "bridge": bridge_name(self.index), "isGateway": True, "hairpinMode": True,
                  "ipMasq": False, "ipam": ipam}  # fmt: skip
        return {"cniVersion": "0.4.0", "name": f"node{self.index}", "plugins": [bridge]}

    def _kubelet_config(self) -> dict[str, object]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "cgroupDriver": "cgroupfs", "cgroupRoot": f"/{CGROUP_PREFIX}{self.index}", "failCgroupV1": False,
            "failSwapOn": False, "enforceNodeAllocatable": [],
            "address": bridge_address(self.index), "port": 10250, "healthzPort": 0, "readOnlyPort": 0,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "clusterDNS": [bridge_address(0)], "clusterDomain": "cluster.local", "resolvConf": "",
            "podLogsDir": str(self.folder / "pod-logs"), "volumePluginDir": str(self.folder / "volume-plugins"),
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            # Images are imported, never pulled: one that was removed could not come back.
            "imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 99,
            # A pod's cores are its share when there are too few, and no limit.
            "cpuCFSQuota": False,
            "nodeStatusUpdateFrequency": "2s", "nodeLeaseDurationSeconds": 10, "makeIPTablesUtilChains": False,
            "serializeImagePulls": False,
            # How much a pod has filled of a folder with a limit is measured so often (each minute in most clusters).
            "volumeStatsAggPeriod": "10s",
        }  # fmt: skip


def mount_memory(folder: Path) -> None:
    """A folder in memory: on a disk, what a node unpacks takes longer to delete than the tests take to run."""
    folder.mkdir(parents=True)
    run("mount", "-t", "tmpfs", "-o", "mode=0755,size=50%", "orbit-bed", folder)


def make_cgroup(name: str) -> None:
    """In every hierarchy of version 1, or in the one of version 2."""
    if (CGROUPS / "cgroup.controllers").exists():
        (CGROUPS / name).mkdir(exist_ok=True)
        return
    for hierarchy in CGROUPS.iterdir():
        if not (hierarchy / "cgroup.procs").exists() or hierarchy.is_symlink() or hierarchy.name == "unified":
            continue
        (hierarchy / name).mkdir(exist_ok=True)
        if (shares := hierarchy / name / "cpu.shares").exists():
            shares.write_text(str(CPU_SHARES))
        # A new cpuset allows nothing until it is told what.
        for file in ("cpuset.cpus", "cpuset.mems"):
            if (hierarchy / file).exists():
                (hierarchy / name / file).write_text((hierarchy / file).read_text())
