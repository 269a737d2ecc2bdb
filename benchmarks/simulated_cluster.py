"""A real control plane with any number of nodes and pods simulated by kwok; the pods answer `/status`.

Belongs here: the cluster, pods that start, end and answer, and the resources that processes use. Does not belong here:
measuring. A node has 8 GPUs. A pod runs as soon as it is scheduled, ends with the exit code in its annotation, and
checkpoints (75) when it is deleted. All pod addresses are in 127.64.0.0/10, where one server answers for all of them.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from cluster.bed.control_plane import ControlPlane
from cluster.bed.pki import ADMIN_TOKEN
from cluster.bed.processes import Processes
from cluster.bed.programs import find_program

ROOT = Path(__file__).resolve().parent.parent
Object = dict[str, Any]
NAMESPACE = "scale"
EXIT = "bench.orbitrl.dev/exit-code"
RUNS = f"/apis/orbitrl.dev/v1alpha1/namespaces/{NAMESPACE}/orbitruns"
JOBS = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
MAPS = f"/api/v1/namespaces/{NAMESPACE}/configmaps"
EVENTS = f"/api/v1/namespaces/{NAMESPACE}/events"
POLICIES = f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies"
METADATA = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io,application/json"
CLIENTS = 32
"""Number of concurrent requests of this program."""
_CLIENT_RATES = {"kube-api-qps": 1000, "kube-api-burst": 2000}
"""By default a controller manager makes 20 calls a second: its limit would be measured instead of the operator."""

_RUNNING = """
conditions:
{{ range $kind := list "Initialized" "Ready" "ContainersReady" }}
- {lastTransitionTime: {{ Now | Quote }}, status: "True", type: {{ $kind }}}
{{ end }}
containerStatuses:
{{ range .spec.containers }}
- image: {{ .image | Quote }}
  name: {{ .name | Quote }}
  ready: true
  started: true
  restartCount: 0
  state: {running: {startedAt: {{ Now | Quote }}}}
{{ end }}
{{ with PodIPsWith .spec.nodeName false .metadata.uid .metadata.name .metadata.namespace }}
podIP: {{ index . 0 | Quote }}
podIPs: [{ip: {{ index . 0 | Quote }}}]
{{ end }}
phase: Running
startTime: {{ Now | Quote }}
"""
_ENDED = """
{{ $code := CODE }}
conditions:
{{ range $kind := list "Ready" "ContainersReady" }}
- {lastTransitionTime: {{ Now | Quote }}, status: "False", type: {{ $kind }}, reason: PodFailed}
{{ end }}
containerStatuses:
{{ range .spec.containers }}
- image: {{ .image | Quote }}
  name: {{ .name | Quote }}
  ready: false
  started: false
  restartCount: 0
  state:
    terminated: {exitCode: {{ $code }}, reason: Ended, startedAt: {{ Now | Quote }}, finishedAt: {{ Now | Quote }}}
{{ end }}
phase: {{ if eq (print $code) "0" }}Succeeded{{ else }}Failed{{ end }}
"""


def build_stages() -> list[Object]:
    """What kwok does to nodes and pods. It only marks a node as ready, once."""
    deleted, living = ({"key": ".metadata.deletionTimestamp", "operator": word} for word in ("Exists", "DoesNotExist"))
    phase = {"key": ".status.phase", "operator": "In"}
    asked = {"key": f'.metadata.annotations["{EXIT}"]', "operator": "Exists"}
    unready = {"key": '.status.conditions.[] | select( .type == "Ready" ) | .status', "operator": "NotIn"}
    code = f'index .metadata.annotations "{EXIT}"'
    ready = 'conditions:\n- {type: Ready, status: "True", reason: Simulated, lastTransitionTime: {{ Now | Quote }}}\n'
    return [
        _stage("Node", "ready", [{**unready, "values": ["True"]}], {"statusTemplate": ready}),
        _stage("Pod", "start", [living, {**phase, "values": ["Pending"]}], {"statusTemplate": _RUNNING}),
        _stage("Pod", "end", [living, asked, {**phase, "values": ["Running"]}],
               {"statusTemplate": _ENDED.replace("CODE", code)}),
        _stage("Pod", "stop", [deleted, {**phase, "values": ["Pending", "Running"]}],
               {"statusTemplate": _ENDED.replace("CODE", "75")}),
        _stage("Pod", "go", [deleted, {**phase, "values": ["Succeeded", "Failed"]}], {"delete": True}),
    ]  # fmt: skip


def _stage(kind: str, name: str, rules: list[Object], following: Object) -> Object:
    return {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "Stage",
        "metadata": {"name": f"{kind.lower()}-{name}"},
        "spec": {
            "resourceRef": {"apiGroup": "v1", "kind": kind},
            "selector": {"matchExpressions": rules},
            "next": following,
        },
    }


@contextmanager
def run_control_plane(folder: Path) -> Iterator[ControlPlane]:
    """API server, controllers, scheduler, and kwok; `Client.make_nodes` creates the nodes."""
    processes = Processes(folder / "logs")
    # Simulated nodes send no heartbeats: those of a thousand would keep the API server busy.
    flags = {"node-monitor-grace-period": "10h", "concurrent-job-syncs": 20, **_CLIENT_RATES}
    plane = ControlPlane(processes, folder, schedules=True, flags=flags)
    try:
        plane.start()
        stages = folder / "stages.yaml"
        stages.write_bytes(b"\n---\n".join(orjson.dumps(stage) for stage in build_stages()))
        processes.start("kwok", find_program("kwok"), {
            "kubeconfig": plane.kubeconfig, "manage-all-nodes": "true", "config": stages, "cidr": "127.64.0.0/10",
            "node-lease-duration-seconds": 0,
        }, KUBE_FEATURE_WatchListClient="false")  # fmt: skip
        yield plane
    finally:
        processes.stop_all()


class Client:
    """A client of the API server with full rights and many concurrent requests."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._places = asyncio.Semaphore(CLIENTS)

    async def call(self, verb: str, path: str, body: Object | None = None, kind: str = "application/json") -> Object:
        data = None if body is None else orjson.dumps(body)
        async with (
            self._places,
            self._session.request(verb, path, data=data, headers={"Content-Type": kind}) as answer,
        ):
            text = await answer.read()
            assert answer.status < 300, f"{verb} {path}: {answer.status} {text[:300]!r}"
            return dict(orjson.loads(text))

    async def merge(self, path: str, body: Object) -> Object:
        return await self.call("PATCH", path, body, "application/merge-patch+json")

    async def make_nodes(self, num_nodes: int) -> None:
        amounts = {"nvidia.com/gpu": "8", "cpu": "192", "memory": "2Ti", "pods": "110", "ephemeral-storage": "10Ti"}

        async def make(name: str) -> None:
            labels = {"kubernetes.io/hostname": name, "nvidia.com/gpu.product": "NVIDIA-B200"}
            status = {"capacity": amounts, "allocatable": amounts}
            head = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
            await self.call("POST", "/api/v1/nodes", {**head, "status": status})

        await asyncio.gather(*(make(f"node-{index}") for index in range(num_nodes)))

    async def watch(
        self, path: str, told: Callable[[str, Object], None], accept: str = "application/json"
    ) -> asyncio.Task[None]:
        """Reports every event from now on, in a task that never ends by itself."""
        head = {"Accept": accept}
        started = asyncio.Event()

        async def follow() -> None:
            version = (await self.call("GET", f"{path}?limit=1"))["metadata"]["resourceVersion"]
            while True:
                query = f"?watch=1&resourceVersion={version}&allowWatchBookmarks=true"
                async with self._session.get(path + query, headers=head) as answer:
                    assert answer.status == 200, await answer.text()
                    started.set()
                    async for line in answer.content:
                        event = orjson.loads(line)
                        version = event["object"]["metadata"]["resourceVersion"]
                        if event["type"] != "BOOKMARK":
                            told(event["type"], event["object"])

        task = asyncio.create_task(follow())
        await started.wait()
        return task


@asynccontextmanager
async def open_client(plane: ControlPlane) -> AsyncIterator[Client]:
    import ssl

    connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=plane.pki.authority), limit=0)
    head = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    limit = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(
        plane.url, connector=connector, headers=head, timeout=limit, read_bufsize=2**24, trust_env=False
    ) as session:
        yield Client(session)


@dataclass
class Pods:
    """Answers for every pod: `/status` of the run at that address. All of them report `step`."""

    runs: dict[str, str] = field(default_factory=dict)
    created: dict[str, float] = field(default_factory=dict)
    """When the first pod of a run was seen, on the loop's clock."""
    step: int = 1
    asked: int = 0

    def told(self, kind: str, pod: Object) -> None:
        run, address = pod["metadata"]["labels"].get("orbitrl.dev/run-name", ""), pod["status"].get("podIP")
        if kind == "ADDED":
            self.created.setdefault(run, asyncio.get_running_loop().time())
        if address:
            self.runs[address] = run

    async def answer(self, request: web.Request) -> web.Response:
        self.asked += 1
        body = {
            "run": self.runs.get(request.host.partition(":")[0]), "phase": "Running", "step": self.step, "total": 60,
            "reward": 0.5, "parity": 1e-4, "parity_limit": 1e-2, "policy_version": self.step, "live": True,
            "last_checkpoint": f"s3://runs/step-{self.step}", "last_checkpoint_step": self.step,
            "tokens_per_second": 1000.0, "eta_seconds": 60.0, "execution": 1,
        }  # fmt: skip
        return web.Response(body=orjson.dumps(body), content_type="application/json")


@asynccontextmanager
async def serve_pods(pods: Pods) -> AsyncIterator[int]:
    """Yields the port on which all pods answer."""
    app = web.Application()
    app.add_routes([web.get("/status", pods.answer)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "0.0.0.0", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine_seconds() -> float:
    """Seconds for which the machine's cores have been busy so far, over all processes."""
    user, nice, system, _idle, _wait, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int, name: str = "VmRSS") -> int:
    """Resident memory in bytes; `VmHWM` is the peak so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
