"""Whether runs give the same bits whatever else the machine does: `make same-bits`, hours on two cores; not in CI.

    python -m tools.same_bits runs  --count 100 --steps 12      one manifest again and again: every step's adapter
    python -m tools.same_bits kills --count 10                  four manifests killed so often: against one left alone

Two threads a run, beside processes that take the cores away and, with `--at-once`, beside other runs. Writes
`runs/same_bits/<what>.json` and exits with 1 where a bit differs.

Belongs here: the repetitions and their table. Does not belong here: manifests, load, comparison (`tests.integration`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from orbit_runtime.storage import open_store
from tests.integration.killing import (
    DEMANDING,
    adapter_digests,
    check_same_run,
    demanding_manifest,
    kill_until_done,
)
from tests.integration.load import ENVIRONMENT, THREADS, busy_machine
from tests.integration.run_launcher import RunLauncher

STEPS_PER_KILL = 2
"""Steps of a run that is killed n times, for each kill: enough that it is never done before it can be killed."""


def repeat(launchers: list[RunLauncher], folder: Path, name: str, *, count: int, steps: int) -> list[dict[str, Any]]:
    """One row per run: its first step, counted from 1, whose adapter differs from run 0's, or None."""
    manifest = demanding_manifest(name, steps=steps)

    def once(launcher: RunLauncher, number: int) -> tuple[float, list[str]]:
        started, out = time.monotonic(), str(folder / f"run-{number}")
        assert launcher.run(manifest, out) == 0, f"run {number} failed"
        return time.monotonic() - started, adapter_digests(open_store(out))

    rows: list[dict[str, Any]] = []
    first: list[str] = []
    for number, (seconds, digests) in enumerate(_at_once(launchers, once, range(count))):
        first = first or digests
        differing = next(
            (at for at, pair in enumerate(zip(first, digests, strict=True), 1) if pair[0] != pair[1]), None
        )
        rows.append({"run": number, "seconds": seconds, "differs_at_step": differing})
        print(f"run {number}: {seconds:.0f} s, differs at step {differing}", flush=True)
    return rows


def kill(launchers: list[RunLauncher], folder: Path, *, count: int) -> list[dict[str, Any]]:
    """One row per manifest: what differs between the run that was killed `count` times and its twin, or None."""
    steps = STEPS_PER_KILL * count + 4

    def one(launcher: RunLauncher, name: str) -> dict[str, Any]:
        started, number = time.monotonic(), list(DEMANDING).index(name)
        manifest = demanding_manifest(name, steps=steps)
        alone, killed = (str(folder / f"{number}-{which}") for which in ("alone", "killed"))
        assert launcher.run(manifest, alone) == 0, f"{name} failed"
        undisturbed = time.monotonic() - started
        kill_until_done(launcher, manifest, killed, kills=count, seed=number, alone=undisturbed)
        differs = None
        try:
            check_same_run(open_store(killed), open_store(alone), kills=count, steps=steps)
        except AssertionError as error:
            differs = str(error).splitlines()[0] if str(error) else "rows, report or rollouts"
        row = {"manifest": name, "steps": steps, "seconds": time.monotonic() - started, "differs": differs}
        print(f"{name}: {count} kills, {steps} steps, {row['seconds']:.0f} s, differs: {differs}", flush=True)
        return row

    return list(_at_once(launchers, one, DEMANDING))


def _at_once[T, R](launchers: list[RunLauncher], job: Callable[[RunLauncher, T], R], over: Iterable[T]) -> Iterator[R]:
    """`job` for each, in order, as many at once as there are launchers: each is the others' load."""
    free: SimpleQueue[RunLauncher] = SimpleQueue()
    for launcher in launchers:
        free.put(launcher)

    def borrow(of: T) -> R:
        launcher = free.get()
        try:
            return job(launcher, of)
        finally:
            free.put(launcher)

    with ThreadPoolExecutor(len(launchers)) as threads:
        yield from threads.map(borrow, over)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("runs", "kills"))
    parser.add_argument("--manifest", choices=DEMANDING, default="LoRA with dropout", help="what is run again")
    parser.add_argument("--count", type=int, help="runs, or kills of each manifest (100 and 10)")
    parser.add_argument("--steps", type=int, default=12, help="of each of the runs")
    parser.add_argument("--processes-per-core", type=int, default=2, help="the load")
    parser.add_argument("--at-once", type=int, default=1, help="runs beside each other")
    parser.add_argument("--out", type=Path, default=Path("runs/same_bits"))
    given = parser.parse_args()
    count = given.count or (100 if given.what == "runs" else 10)
    with ExitStack() as ending:
        launchers = [ending.enter_context(closing(RunLauncher(ENVIRONMENT))) for _ in range(given.at_once)]
        load = ending.enter_context(busy_machine(given.processes_per_core))
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory()))
        if given.what == "runs":
            rows = repeat(launchers, folder, given.manifest, count=count, steps=given.steps)
        else:
            rows = kill(launchers, folder, count=count)
    differing = sum(row.get("differs_at_step", row.get("differs")) is not None for row in rows)
    facts = {
        "what": given.what, "count": count, "rows": rows, "differing": differing, "load_processes": load,
        "at_once": given.at_once, "threads": THREADS, "cpus": os.cpu_count(), "machine": platform.machine(),
        "load_average": os.getloadavg()[0],
    }  # fmt: skip
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"{given.what}.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(f"{len(rows) - differing} of {len(rows)} have the same bits, with {load} processes beside each")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
