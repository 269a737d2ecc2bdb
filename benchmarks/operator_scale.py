"""The operator with a thousand runs and with five thousand: how fast, how big, how many calls.

Belongs here: the episodes of a run's life, and what is measured of each. Does not belong here: the cluster and its
simulated pods (`simulated_cluster`). Needs what `make test-cluster` needs, but no root: `ORBIT_TEST_PROGRAMS` names the
folder that `tools/cluster_programs.sh kubernetes kwok` prints.

Everything shares this machine's cores with the operator: API server, etcd, controllers, scheduler, kwok, and this
program, which makes the runs and answers for their pods. "Others" is what the rest of the machine took meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import RESULTS
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

MIB = 2**20
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
WRITES = ("POST", "PUT", "PATCH", "DELETE")
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Row:
    """One measured number and its bound; `None` where it is only told."""

    what: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def is_met(self) -> bool:
        return self.limit is None or self.value <= self.limit


@dataclass
class History:
    """What the API server told of every run, on the loop's clock."""

    jobs: dict[str, float] = field(default_factory=dict)
    statuses: dict[str, float] = field(default_factory=dict)
    now: dict[str, tuple[str, str, int]] = field(default_factory=dict)
    """Phase, reason and attempt."""
    changes: int = 0

    def told_job(self, kind: str, job: Object) -> None:
        if kind == "ADDED":
            self.jobs.setdefault(job["metadata"]["labels"]["orbitrl.dev/run-name"], _now())

    def told_run(self, _kind: str, run: Object) -> None:
        name, status = run["metadata"]["name"], run.get("status")
        if not status:
            return
        self.statuses.setdefault(name, _now())
        state = (status["phase"], status["reason"], status.get("attempt") or 0)
        if self.now.get(name) != state:
            self.now[name] = state
            self.changes += 1

    def num(self, *phases: str) -> int:
        return sum(state[0] in phases for state in self.now.values())


class Operator:
    """The real process, with its defaults, and what it says of itself."""

    def __init__(self, plane: ControlPlane, log: Path) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ORBIT_")}
        mine = {
            "KUBECONFIG": str(plane.kubeconfig),
            "PYTHONPATH": f"{ROOT / 'operator'}{os.pathsep}{ROOT}",
            "ORBIT_OPERATOR_NAMESPACES": NAMESPACE,
            "ORBIT_OPERATOR_NAMESPACE": NAMESPACE,
            "ORBIT_OPERATOR_METRICS_PORT": "18080",
            "ORBIT_OPERATOR_HEALTH_PORT": "18081",
        }
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "orbit_operator"], env={**inherited, **mine}, stdout=output, stderr=output
            )
        self.pid = self.process.pid

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

    async def samples(self) -> dict[tuple[str, ...], float]:
        """Its own counters: name, and values of the labels in the order of their names (code, resource, verb)."""
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


@dataclass(frozen=True)
class Episode:
    """What happened between two moments."""

    seconds: float
    writes: dict[str, int]
    """Verb and resource; the Lease's not counted."""
    reads: int
    changes: int
    passes: int
    mean_pass: float
    p99_pass: float
    """From taking the run out of the queue until all is written; what it waited in the queue is `p99_wait`."""
    p99_wait: float
    cpu: float
    """Seconds of the operator."""
    others: float
    """Cores that the rest of the machine kept busy."""
    resident: int

    @property
    def num_writes(self) -> int:
        return sum(self.writes.values())


class Bench:
    """One control plane, one operator, `num_runs` runs."""

    def __init__(self, plane: ControlPlane, client: Client, operator: Operator, pods: Pods, port: int) -> None:
        self.plane, self.client, self.operator, self.pods = plane, client, operator, pods
        self.history = History()
        manifest = load_manifest(ROOT / "examples" / "quickstart.yaml").to_manifest()
        spec = {"storage": {"uri": "s3://runs"}, "placement": {"gpus": 8}, "observability": {"metricsPort": port}}
        self._manifest = {**manifest, "spec": {**manifest["spec"], **spec}}
        self._pids = [*(process.pid for process in plane.processes.running.values()), operator.pid, os.getpid()]

    def manifest(self, name: str) -> Object:
        return {**self._manifest, "metadata": {"name": name, "namespace": NAMESPACE}}

    async def wait(self, probe: Callable[[], bool], what: str, seconds: float = 900) -> None:
        until = _now() + seconds
        while not probe():
            assert self.operator.process.poll() is None, self.operator.log.read_text()[-3000:]
            assert _now() < until, f"not within {seconds:.0f} s: {what}"
            await asyncio.sleep(0.05)

    async def settle(self) -> None:
        """Until the operator has written nothing for a while."""
        before = -1.0
        while True:
            samples = await self.operator.samples()
            writes = sum(_writes(samples).values())
            if writes == before and not samples.get(("orbit_operator_queue_depth",)):
                return
            before = writes
            await asyncio.sleep(5)

    @asynccontextmanager
    async def episode(self, facts: dict[str, Any], name: str) -> AsyncIterator[None]:
        """Keeps what happened inside of it under its name."""
        mine = self._cpu()
        first, changes, began = await self.operator.samples(), self.history.changes, _now()
        cpu, machine = cpu_seconds(self.operator.pid), machine_seconds()
        yield
        seconds = _now() - began
        used = cpu_seconds(self.operator.pid) - cpu
        others = (machine_seconds() - machine - (self._cpu() - mine)) / seconds
        last = await self.operator.samples()
        passes = _passes(last) - _passes(first)
        total = ("orbit_operator_reconcile_seconds_sum",)
        facts[name] = Episode(
            seconds, {name: round(count - _writes(first).get(name, 0)) for name, count in _writes(last).items()
                      if count > _writes(first).get(name, 0)},
            round(_reads(last) - _reads(first)), self.history.changes - changes, round(passes),
            (last[total] - first.get(total, 0)) / passes if passes else 0.0, quantile("reconcile", first, last, 0.99),
            quantile("queue", first, last, 0.99), used, max(0.0, others), memory_bytes(self.operator.pid),
        )  # fmt: skip
        print(f"{facts['runs']} runs: {name} took {seconds:.0f} s", file=sys.stderr, flush=True)

    def _cpu(self) -> float:
        return sum(cpu_seconds(pid) for pid in self._pids)

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
        """The live pods of these runs end so."""
        pods = (await self.client.call("GET", f"{PODS}?resourceVersion=0"))["items"]
        wanted = set(names)
        live = [pod["metadata"]["name"] for pod in pods if pod["status"].get("phase") == "Running"
                and pod["metadata"]["labels"]["orbitrl.dev/run-name"] in wanted]  # fmt: skip
        asked = {"metadata": {"annotations": {EXIT: str(code)}}}
        await self.each(live, lambda name: self.client.merge(f"{PODS}/{name}", asked))


async def measure(bench: Bench, num_runs: int, idle_seconds: float, folder: Path, *, whole: bool) -> dict[str, Any]:
    """All episodes, or those that sizes are compared by; what they were, by name."""
    history, kubectl = bench.history, find_program("kubectl")
    facts: dict[str, Any] = {"runs": num_runs, "resident empty": memory_bytes(bench.operator.pid)}
    facts["apply, few runs"] = [await bench.apply_one(kubectl, f"few-{index}", folder) for index in range(15)]
    names = [f"run-{index:05}" for index in range(num_runs)]
    await bench.settle()

    async with bench.episode(facts, "create"):
        began = _now()
        await bench.create(names)
        facts["created after"] = _now() - began
        await bench.wait(lambda: len(history.jobs) >= num_runs + 15 and len(history.statuses) >= num_runs + 15,
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
        await asyncio.sleep(idle_seconds)
    if whole:
        await _live(bench, names, facts, idle_seconds)
    facts["resident highest"] = memory_bytes(bench.operator.pid, "VmHWM")
    return facts


async def _live(bench: Bench, names: list[str], facts: dict[str, Any], idle_seconds: float) -> None:
    """Training, crashes, pauses, ends."""
    history, client = bench.history, bench.client
    async with bench.episode(facts, "train"):
        until = _now() + 60
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
        await asyncio.sleep(idle_seconds)


Samples = dict[tuple[str, ...], float]


def quantile(what: str, first: Samples, last: Samples, part: float) -> float:
    """Of what a histogram saw between two scrapes: as far as its buckets can tell, even inside the bucket it is in."""
    name = f"orbit_operator_{what}_seconds_bucket"
    counts = sorted(
        (float(key[1].replace("+Inf", "inf")), count - first.get(key, 0))
        for key, count in last.items()
        if key[0] == name
    )
    total = counts[-1][1] if counts else 0
    lower, below = 0.0, 0.0
    for bound, count in counts:
        if total and count >= part * total:
            if bound == float("inf"):
                return bound
            return lower + (bound - lower) * (part * total - below) / max(1.0, count - below)
        lower, below = bound, count
    return 0.0


def rows_of(facts: dict[str, Any]) -> list[Row]:
    """The table, with its bounds; those for a thousand runs are only told where there are more."""
    few = facts["runs"] <= 1000
    changing = [name for name in ("start", "crash", "suspend", "resume", "complete") if name in facts]
    change = [facts[name] for name in changing]
    busy = {name: facts[name] for name in ("create", *changing[:1], "train", *changing[1:]) if name in facts}
    rows = [
        Row("created to each having its Job and its status", facts["served after"], "s", 60 if few else None),
        Row("of that, until the last was created", facts["created after"], "s"),
        Row("pass over one run, p99 in the slowest episode", max(each.p99_pass for each in busy.values()), "s", 1.0),
        *(Row(f"  {name}", each.p99_pass, "s") for name, each in busy.items()),
        Row("wait for a worker before it, p99 in the slowest", max(each.p99_wait for each in busy.values()), "s"),
        Row("operator's CPU per run, creation", 1000 * facts["create"].cpu / facts["runs"], "ms"),
        Row("operator's CPU per run, start", 1000 * facts["start"].cpu / facts["runs"], "ms"),
        Row("resident memory, most ever", facts["resident highest"] / MIB, "MiB", 128 if few else None),
        Row("resident memory, without any run", facts["resident empty"] / MIB, "MiB"),
        Row("API writes per run, creation", facts["create"].num_writes / facts["runs"], ""),
        Row("API writes per change of state, after creation",
            sum(each.num_writes for each in change) / sum(each.changes for each in change), "", 3.0),
        *(Row(f"  {name}", facts[name].num_writes / max(1, facts[name].changes), "") for name in changing),
        Row("CPU, all runs train and nothing changes", _share(facts["idle"]), "%", 2.0 if few else None),
        *(Row(what, _share(facts[name]), "%", limit) for what, name, limit in (
            ("CPU, most runs finished", "idle, most finished", 2.0 if few else None),
            ("CPU, every run reports a new step each time", "train", None),
        ) if name in facts),
        Row("kubectl apply to pod, few runs, median", median(facts["apply, few runs"]), "s", 1.0),
        Row("kubectl apply to pod, many runs, median", median(facts["apply, many runs"]), "s", 1.0),
        Row("cores taken by others while creating", facts["create"].others, ""),
    ]  # fmt: skip
    return rows


def compare_sizes(few: dict[str, Any], many: dict[str, Any]) -> list[Row]:
    """Nothing grows more than the number of runs does: ratio of ratios."""
    factor = many["runs"] / few["runs"]

    def grown(facts: dict[str, Any]) -> float:
        return float(facts["resident highest"] - facts["resident empty"])

    where = f"{many['runs']} runs against {few['runs']}, per run"
    return [
        Row(f"time to Job and status: {where}", many["served after"] / few["served after"] / factor, "x", 1.0),
        Row(f"memory above that without runs: {where}", grown(many) / grown(few) / factor, "x", 1.0),
        Row(f"operator's CPU for creation: {where}", many["create"].cpu / few["create"].cpu / factor, "x", 1.0),
    ]


def table(rows: list[Row]) -> str:
    lines = [f"{'what':<76} {'measured':>10} {'bound':>8}"]
    for row in rows:
        bound = "" if row.limit is None else f"{row.limit:g}"
        miss = "" if row.is_met else "  MISSED"
        lines.append(f"{row.what:<76} {row.value:>10.3f} {bound:>8} {row.unit}{miss}")
    return "\n".join(lines)


async def run_size(num_runs: int, idle_seconds: float, folder: Path, *, whole: bool) -> dict[str, Any]:
    with run_control_plane(folder) as plane:
        async with open_client(plane) as client:
            crd = build_crd()
            await client.call("POST", CRDS, crd)
            await client.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
            await client.make_nodes(num_runs + 30)
            pods = Pods()
            async with serve_pods(pods) as port:
                operator = Operator(plane, folder / "operator.log")
                try:
                    bench = Bench(plane, client, operator, pods, port)
                    while not await operator.is_ready():
                        await asyncio.sleep(0.1)
                    watches = [
                        await client.watch(RUNS, bench.history.told_run),
                        await client.watch(JOBS, bench.history.told_job, METADATA),
                        await client.watch(PODS, pods.told),
                    ]
                    facts = await measure(bench, num_runs, idle_seconds, folder, whole=whole)
                    for task in watches:
                        assert not task.done(), task.exception()
                        task.cancel()
                    return facts
                finally:
                    operator.stop()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _share(episode: Episode) -> float:
    return 100 * episode.cpu / episode.seconds


def _writes(samples: dict[tuple[str, ...], float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, count in samples.items():
        if key[0] == "orbit_operator_api_requests_total" and key[3] in WRITES and key[2] != "leases":
            name = f"{key[3]} {key[2]} {key[1]}"
            found[name] = found.get(name, 0) + count
    return found


def _reads(samples: dict[tuple[str, ...], float]) -> float:
    return sum(count for key, count in samples.items()
               if key[0] == "orbit_operator_api_requests_total" and key[3] == "GET" and key[2] != "leases")  # fmt: skip


def _passes(samples: dict[tuple[str, ...], float]) -> float:
    return samples.get(("orbit_operator_reconcile_seconds_count",), 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON file")
    parser.add_argument(
        "--sizes", default="1000,5000", help="numbers of runs: the first lives through it all, the others only start"
    )
    parser.add_argument(
        "--idle", type=float, default=300, help="seconds of each idle episode of the first size; of others at most 60"
    )
    given = parser.parse_args()
    if "ORBIT_TEST_PROGRAMS" not in os.environ:
        print("skipped: ORBIT_TEST_PROGRAMS is not set; `tools/cluster_programs.sh kubernetes kwok` prints it")
        return
    # Whoever ends us early shall leave no cluster behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    measured, rows = [], []
    given.out.mkdir(parents=True, exist_ok=True)
    for size in map(int, given.sizes.split(",")):
        idle = given.idle if not measured else min(60.0, given.idle)
        with tempfile.TemporaryDirectory(prefix="orbit-scale-") as name:
            began = time.monotonic()
            measured.append(asyncio.run(run_size(size, idle, Path(name), whole=not measured)))
        found = rows_of(measured[-1]) + (compare_sizes(measured[0], measured[-1]) if measured[1:] else [])
        print(f"{size} runs, {time.monotonic() - began:.0f} s\n{table(found)}\n", flush=True)
        rows += found
        # After each: more runs may take long, or fail.
        content = {"name": "operator_scale", "machine": machine, "rows": rows, "facts": measured}
        text = json.dumps(content, indent=2, sort_keys=True, default=asdict)
        (given.out / "operator_scale.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
