"""Whether runs give the same bits whatever else the machine does: `make same-bits`, hours on two cores; not in CI.

    python -m tools.same_bits runs  --count 100 --steps 12      one manifest again and again: every step's adapter
    python -m tools.same_bits kills --count 10                  three manifests killed so often: against one left alone

Two threads a run, beside processes that take the cores away. Writes `runs/same_bits/<what>.json` and exits with 1 where
a bit differs.

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
from pathlib import Path
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


def repeat(launcher: RunLauncher, folder: Path, *, count: int, steps: int) -> list[dict[str, Any]]:
    """One row per run: its first step, counted from 1, whose adapter differs from the first run's, or None."""
    manifest = demanding_manifest("LoRA with dropout", steps=steps)
    rows: list[dict[str, Any]] = []
    first: list[str] = []
    for number in range(count):
        started = time.monotonic()
        out = str(folder / f"run-{number}")
        assert launcher.run(manifest, out) == 0, f"run {number} failed"
        digests = adapter_digests(open_store(out))
        first = first or digests
        differing = next(
            (at for at, pair in enumerate(zip(first, digests, strict=True), 1) if pair[0] != pair[1]), None
        )
        rows.append({"run": number, "seconds": time.monotonic() - started, "differs_at_step": differing})
        print(f"run {number}: {rows[-1]['seconds']:.0f} s, differs at step {differing}", flush=True)
    return rows


def kill(launcher: RunLauncher, folder: Path, *, count: int) -> list[dict[str, Any]]:
    """One row per manifest: what differs between the run that was killed `count` times and its twin, or None."""
    rows: list[dict[str, Any]] = []
    steps = STEPS_PER_KILL * count + 4
    for number, name in enumerate(DEMANDING):
        started = time.monotonic()
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
        rows.append({"manifest": name, "steps": steps, "seconds": time.monotonic() - started, "differs": differs})
        print(f"{name}: {count} kills, {steps} steps, {rows[-1]['seconds']:.0f} s, differs: {differs}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("runs", "kills"))
    parser.add_argument("--count", type=int, help="runs, or kills of each manifest (100 and 10)")
    parser.add_argument("--steps", type=int, default=12, help="of each of the runs")
    parser.add_argument("--processes-per-core", type=int, default=2, help="the load")
    parser.add_argument("--out", type=Path, default=Path("runs/same_bits"))
    given = parser.parse_args()
    count = given.count or (100 if given.what == "runs" else 10)
    launcher = RunLauncher(ENVIRONMENT)
    try:
        with busy_machine(given.processes_per_core) as load, tempfile.TemporaryDirectory() as folder:
            if given.what == "runs":
                rows = repeat(launcher, Path(folder), count=count, steps=given.steps)
            else:
                rows = kill(launcher, Path(folder), count=count)
    finally:
        launcher.close()
    differing = sum(row.get("differs_at_step", row.get("differs")) is not None for row in rows)
    facts = {
        "what": given.what, "count": count, "rows": rows, "differing": differing, "load_processes": load,
        "threads": THREADS, "cpus": os.cpu_count(), "machine": platform.machine(),
        "load_average": os.getloadavg()[0],
    }  # fmt: skip
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"{given.what}.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(f"{len(rows) - differing} of {len(rows)} have the same bits, with {load} processes beside each")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
