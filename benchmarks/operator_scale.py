"""The operator with a thousand runs and with five thousand: its speed, memory and number of calls.

Belongs here: the episodes of a run's life, and what is measured of each. Does not belong here: the cluster and its
simulated pods (`simulated_cluster`), the table (`operator_table`). Needs what `make test-cluster` needs, but no root:
`ORBIT_TEST_PROGRAMS` names the folder that `tools/cluster_programs.sh kubernetes kwok` prints.

Everything shares this machine's cores with the operator: API server, etcd, controllers, scheduler, kwok, and this
program, which creates the runs and answers for their pods. "Others" is the CPU use of the rest of the machine. As a
measure of the machine's speed, a client creates runs and everything that the operator writes for them, without an
operator. Kubernetes' programs collect garbage a quarter as often as by default, as in `make test-cluster`; `GOGC=100`
in the environment restores the default.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bare_writes import Writes
from benchmarks.harness import Measured, NotMeasured, run
from benchmarks.operator_table import (
    NUM_BARE,
    Episode,
    compare_sizes,
    count_passes,
    count_reads,
    count_writes,
    quantile,
    rows_of,
    table,
)
from benchmarks.simulated_cluster import (
    EXIT,
    JOBS,
    METADATA,
    NAMESPACE,
    PODS,
    ROOT,
    RUNS,
    Client,
    ControlPlane,
    Object,
    Pods,
    cpu_seconds,
    find_program,
    machine_seconds,
    memory_bytes,
    open_client,
    run_control_plane,
    serve_pods,
)
from orbit_runtime.spec import load_manifest
from orbit_runtime.spec.crd import build_crd

MEASURES = ("operator", "benchmarks/bare_writes.py", "benchmarks/operator_table.py", "benchmarks/simulated_cluster.py")
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "etcd", "kwok")
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass
class History:
    """When the API server reported each change of every run, on the loop's clock."""

    jobs: dict[str, float] = field(default_factory=dict)
    statuses: dict[str, float] = field(default_factory=dict)
    now: dict[str, tuple[str, str, int]] = field(default_factory=dict)
    """Phase, reason and attempt."""
    changes: int = 0
    first: Object = field(default_factory=dict)
    """The first status seen of any run."""

    def told_job(self, kind: str, job: Object) -> None:
        if kind == "ADDED":
            self.jobs.setdefault(job["metadata"]["labels"]["orbitrl.dev/run-name"], _now())

    def told_run(self, _kind: str, run: Object) -> None:
        name, status = run["metadata"]["name"], run.get("status")
        if not status:
            return
        self.first = self.first or status
        self.statuses.setdefault(name, _now())
        state = (status["phase"], status["reason"], status.get("attempt") or 0)
        if self.now.get(name) != state:
            self.now[name] = state
            self.changes += 1

    def num(self, *phases: str) -> int:
        return sum(state[0] in phases for state in self.now.values())


class Operator:
    """The real process, with its defaults, and its own metrics."""

    def __init__(self, plane: ControlPlane, log: Path) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ORBIT_")}
        self._environment = inherited | {
            "KUBECONFIG": str(plane.kubeconfig),
            "PYTHONPATH": f"{ROOT / 'operator'}{os.pathsep}{ROOT}",
            "ORBIT_OPERATOR_NAMESPACES": NAMESPACE,
            "ORBIT_OPERATOR_NAMESPACE": NAMESPACE,
            "ORBIT_OPERATOR_METRICS_PORT": "18080",
            "ORBIT_OPERATOR_HEALTH_PORT": "18081",
        }
        self.log = log
        self.start()

    def start(self) -> None:
        """May be called again after `stop`."""
        command = [sys.executable, "-m", "orbit_operator"]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(command, env=self._environment, stdout=output, stderr=output)

    @property
    def pid(self) -> int:
        return self.process.pid

    async def ask(self, port: int, path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession(trust_env=False) as session:
            try:
                async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
                    return answer.status, await answer.text()
            except aiohttp.ClientError:
                return 0, ""

    async def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return (await self.ask(18081, "/readyz"))[0] == 200

    async def wait_ready(self) -> None:
        while not await self.is_ready():
            await asyncio.sleep(0.1)

    async def samples(self) -> dict[tuple[str, ...], float]:
        """Its counters by name and label values, in the order of the labels' names (code, resource, verb)."""
        _, text = await self.ask(18080, "/metrics")
        return {
            (name, *(value for _, value in sorted(_LABEL.findall(labels or "")))): float(value)
            for name, labels, value in _SAMPLE.findall(text)
            if name.startswith("orbit_operator_")
        }

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Bench:
    """One control plane, one operator, `num_runs` runs."""

    def __init__(self, plane: ControlPlane, client: Client, operator: Operator, pods: Pods, port: int) -> None:
        self.plane, self.client, self.operator, self.pods = plane, client, operator, pods
        self.history = History()
        manifest = load_manifest(ROOT / "examples" / "quickstart.yaml").to_manifest()
        spec = {"storage": {"uri": "s3://runs"}, "placement": {"gpus": 8}, "observability": {"metricsPort": port}}
        self._manifest = {**manifest, "spec": {**manifest["spec"], **spec}}
        self._rest = {name: process.pid for name, process in plane.processes.running.items()}
        self._rest |= {"benchmark": os.getpid()}

    def manifest(self, name: str) -> Object:
        return {**self._manifest, "metadata": {"name": name, "namespace": NAMESPACE}}

    async def wait(self, probe: Callable[[], bool], what: str, seconds: float = 900) -> None:
        until = _now() + seconds
        while not probe():
            assert self.operator.process.poll() is None, self.operator.log.read_text()[-3000:]
            assert _now() < until, f"not within {seconds:.0f} s: {what}"
            await asyncio.sleep(0.05)

    async def settle(self) -> None:
        """Waits until the operator has written nothing for a while."""
        before = -1.0
        while True:
            samples = await self.operator.samples()
            writes = sum(count_writes(samples).values())
            if writes == before and not samples.get(("orbit_operator_queue_depth",)):
                return
            before = writes
            await asyncio.sleep(5)

    @asynccontextmanager
    async def episode(self, facts: dict[str, Any], name: str) -> AsyncIterator[None]:
        """Records under its name what happens within the context."""
        rest = self._rest_seconds()
        first, changes, began = await self.operator.samples(), self.history.changes, _now()
        cpu, machine = cpu_seconds(self.operator.pid), machine_seconds()
        yield
        seconds = _now() - began
        used = cpu_seconds(self.operator.pid) - cpu
        rest = {name: taken - rest[name] for name, taken in self._rest_seconds().items()}
        others = (machine_seconds() - machine - used - sum(rest.values())) / seconds
        last = await self.operator.samples()
        passes = count_passes(last) - count_passes(first)
        total = ("orbit_operator_reconcile_seconds_sum",)
        writes = {name: round(count - count_writes(first).get(name, 0)) for name, count in count_writes(last).items()}
        facts[name] = Episode(
            seconds, {name: count for name, count in writes.items() if count},
            round(count_reads(last) - count_reads(first)), self.history.changes - changes, round(passes),
            (last[total] - first.get(total, 0)) / passes if passes else 0.0, quantile("reconcile", first, last, 0.99),
            quantile("queue", first, last, 0.99), used, rest, max(0.0, others), memory_bytes(self.operator.pid),
        )  # fmt: skip
        print(f"{facts['runs']} runs: {name} took {seconds:.0f} s", file=sys.stderr, flush=True)

    def _rest_seconds(self) -> dict[str, float]:
        return {name: cpu_seconds(pid) for name, pid in self._rest.items()}

    async def apply_one(self, kubectl: str, name: str, folder: Path) -> float:
        """Seconds from starting `kubectl apply` to the pod's existence."""
        path = folder / f"{name}.json"
        path.write_text(json.dumps(self.manifest(name)))
        began = _now()
        words = [kubectl, "--kubeconfig", str(self.plane.kubeconfig), "apply", "-f", str(path)]
        process = await asyncio.create_subprocess_exec(*words, stdout=subprocess.DEVNULL)
        assert await process.wait() == 0
        await self.wait(lambda: name in self.pods.created, f"{name} has a pod")
        return self.pods.created[name] - began

    async def create(self, names: list[str]) -> None:
        await asyncio.gather(*(self.client.call("POST", RUNS, self.manifest(name)) for name in names))

    async def each(self, names: list[str], change: Callable[[str], Any]) -> None:
        await asyncio.gather(*(change(name) for name in names))

    async def end_pods(self, code: int, names: list[str]) -> None:
        """Ends the live pods of these runs with this exit code."""
        pods = (await self.client.call("GET", f"{PODS}?resourceVersion=0"))["items"]
        wanted = set(names)
        live = [pod["metadata"]["name"] for pod in pods if pod["status"].get("phase") == "Running"
                and pod["metadata"]["labels"]["orbitrl.dev/run-name"] in wanted]  # fmt: skip
        asked = {"metadata": {"annotations": {EXIT: str(code)}}}
        await self.each(live, lambda name: self.client.merge(f"{PODS}/{name}", asked))

    async def write_bare(self) -> float:
        """Seconds for `NUM_BARE` runs and their objects, without an operator; restarts it when they are gone."""
        writes = await Writes.read(self.client, "few-0", self.history.first)
        self.operator.stop()
        # Never the same names twice: events outlive their objects.
        names = [f"bare-{int(_now())}-{index}" for index in range(NUM_BARE)]
        seconds = await writes.repeat(self.client, [self.manifest(name) for name in names])
        await self.each(names, lambda name: self.client.call("DELETE", f"{RUNS}/{name}"))
        for path in (JOBS, PODS):
            while await self._has(path, "bare-"):
                await asyncio.sleep(1)
        self.operator.start()
        await self.operator.wait_ready()
        return seconds

    async def _has(self, path: str, prefix: str) -> bool:
        found = (await self.client.call("GET", path))["items"]
        return any(each["metadata"]["name"].startswith(prefix) for each in found)


@dataclass(frozen=True)
class Lengths:
    """Lengths, in seconds, of the episodes that only wait."""

    idle: float
    train: float
    """A minimum: every pod must be polled."""


async def measure_episodes(
    bench: Bench, num_runs: int, lengths: Lengths, folder: Path, *, whole: bool
) -> dict[str, Any]:
    """Runs all episodes, or only those used to compare sizes; returns their measurements by name."""
    history, kubectl = bench.history, find_program("kubectl")
    facts: dict[str, Any] = {"runs": num_runs}
    facts["apply, few runs"] = [await bench.apply_one(kubectl, f"few-{index}", folder) for index in range(15)]
    names = [f"run-{index:05}" for index in range(num_runs)]
    wanted = set(names)
    await bench.settle()
    facts["bare"] = await bench.write_bare()
    await bench.settle()
    facts["resident empty"] = memory_bytes(bench.operator.pid)

    async with bench.episode(facts, "create"):
        began = _now()
        await bench.create(names)
        facts["created after"] = _now() - began
        await bench.wait(lambda: wanted <= history.jobs.keys() and wanted <= history.statuses.keys(),
                         "every run has its Job and its status")  # fmt: skip
    waits = sorted(max(history.jobs[name], history.statuses[name]) - began for name in names)
    facts["served after"] = waits[-1]
    async with bench.episode(facts, "start"):
        await bench.wait(lambda: history.num("Running") >= num_runs + 15, "every run trains")
        await bench.settle()
    facts["apply, many runs"] = [await bench.apply_one(kubectl, f"more-{index}", folder) for index in range(15)]
    await bench.wait(lambda: history.num("Running") >= num_runs + 30, "these train as well")
    await bench.settle()
    async with bench.episode(facts, "idle"):
        await asyncio.sleep(lengths.idle)
    most = memory_bytes(bench.operator.pid, "VmHWM")
    facts["bare, many runs"] = await bench.write_bare()
    await bench.settle()
    if whole:
        await _live(bench, names, facts, lengths)
    facts["resident highest"] = max(most, memory_bytes(bench.operator.pid, "VmHWM"))
    return facts


async def _live(bench: Bench, names: list[str], facts: dict[str, Any], lengths: Lengths) -> None:
    """Training, crashes, pauses and endings."""
    history, client = bench.history, bench.client
    async with bench.episode(facts, "train"):
        # Long enough to poll each pod: ten polls a second for all pods together.
        until = _now() + max(lengths.train, len(names) / 10 + 5)
        while _now() < until:
            bench.pods.step += 1
            await asyncio.sleep(1)

    tenth = len(names) // 10
    crash, pause, rest = names[:tenth], names[tenth : 2 * tenth], names[2 * tenth :]
    async with bench.episode(facts, "crash"):
        await bench.end_pods(82, crash)
        again = ("Running", "Running", 2)
        await bench.wait(lambda: all(history.now[name] == again for name in crash), "the second attempts train")
        await bench.settle()

    def suspend(value: bool) -> Callable[[str], Any]:
        return lambda name: client.merge(f"{RUNS}/{name}", {"spec": {"lifecycle": {"suspend": value}}})

    async with bench.episode(facts, "suspend"):
        await bench.each(pause, suspend(True))
        await bench.wait(lambda: history.num("Suspended") >= tenth, "they are suspended")
        await bench.settle()
    async with bench.episode(facts, "resume"):
        await bench.each(pause, suspend(False))
        await bench.wait(lambda: all(history.now[name] == again for name in pause), "they train again")
        await bench.settle()
    async with bench.episode(facts, "complete"):
        await bench.end_pods(0, rest)
        await bench.wait(lambda: history.num("Succeeded") >= len(rest), "they have succeeded")
        await bench.settle()
    async with bench.episode(facts, "idle, most finished"):
        await asyncio.sleep(lengths.idle)


async def run_size(num_runs: int, lengths: Lengths, folder: Path, *, whole: bool) -> dict[str, Any]:
    with run_control_plane(folder) as plane:
        async with open_client(plane) as client:
            crd = build_crd()
            await client.call("POST", CRDS, crd)
            await client.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
            await client.make_nodes(num_runs + 30 + NUM_BARE)
            pods = Pods()
            async with serve_pods(pods) as port:
                operator = Operator(plane, folder / "operator.log")
                try:
                    bench = Bench(plane, client, operator, pods, port)
                    await operator.wait_ready()
                    watches = [
                        await client.watch(RUNS, bench.history.told_run),
                        await client.watch(JOBS, bench.history.told_job, METADATA),
                        await client.watch(PODS, pods.told),
                    ]
                    facts = await measure_episodes(bench, num_runs, lengths, folder, whole=whole)
                    for task in watches:
                        assert not task.done(), task.exception()
                        task.cancel()
                    return facts
                finally:
                    operator.stop()


def _now() -> float:
    return asyncio.get_running_loop().time()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sizes", default="1000,5000", help="numbers of runs: the first lives through it all, the others only start"
    )
    parser.add_argument(
        "--idle", type=float, default=300, help="seconds of each idle episode of the first size; of others at most 60"
    )


def check_programs() -> None:
    """Raises NotMeasured if no folder of programs is named, or if it lacks one."""
    folders = os.environ.get("ORBIT_TEST_PROGRAMS")
    how = "`tools/cluster_programs.sh kubernetes kwok` builds them and prints their folder"
    if not folders:
        raise NotMeasured(f"ORBIT_TEST_PROGRAMS is not set; {how}")
    missing = [name for name in PROGRAMS if shutil.which(name, path=folders) is None]
    if missing:
        raise NotMeasured(f"no {', '.join(missing)} in ORBIT_TEST_PROGRAMS={folders}; {how}")


def measure(options: argparse.Namespace) -> Measured:
    check_programs()
    os.environ.setdefault("GOGC", "400")
    # Leaves no cluster behind if this process is ended early.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sizes = [10, 12] if options.smallest else [int(each) for each in options.sizes.split(",")]
    idle, train = (2.0, 5.0) if options.smallest else (options.idle, 60.0)
    found, rows = [], []
    for size in sizes:
        whole = not found
        with tempfile.TemporaryDirectory(prefix="orbit-scale-") as name:
            began = time.monotonic()
            lengths = Lengths(idle if whole else min(60.0, idle), train)
            found.append(asyncio.run(run_size(size, lengths, Path(name), whole=whole)))
        new = rows_of(found[-1]) + ([] if whole else compare_sizes(found[0], found[-1]))
        print(f"{size} runs, {time.monotonic() - began:.0f} s\n{table(new)}\n", flush=True)
        rows += new
    # Converted to plain values; infinity, which JSON lacks, becomes null.
    figures = orjson.loads(orjson.dumps({"rows": rows, "sizes": found}))
    return Measured(figures=figures, facts={"GOGC": os.environ["GOGC"]})


if __name__ == "__main__":
    raise SystemExit(run(__file__, __doc__, measure, add_options))
