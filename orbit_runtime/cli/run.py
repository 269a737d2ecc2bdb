"""`orbit run`: check the manifest, the installation and that it fits, train, say what came of it.

Belongs here: the order of those, and their words. Does not belong here: training (`loop`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orbit_runtime.api.running import start_run
from orbit_runtime.cli.output import before_and_after, print_json
from orbit_runtime.errors import EXIT_DONE, EXIT_STOPPED, OrbitError

if TYPE_CHECKING:
    from orbit_runtime.loop.run import RunResult
    from orbit_runtime.observability.progress import Progress
    from orbit_runtime.spec import OrbitRun


def run_manifest(file: Path, *, out: str | None, overrides: Sequence[str], dry_run: bool, as_json: bool) -> int:
    """Returns the exit code: 0 when the run is done, 75 when it was stopped on request."""
    from orbit_runtime.spec import load_manifest

    manifest = load_manifest(file, overrides)
    if dry_run:
        _print_processes(manifest, file.resolve().parent, as_json)
        return EXIT_DONE
    return run_with(manifest, partial(start_run, manifest, file.resolve().parent, out), as_json=as_json)


def run_with(manifest: OrbitRun, train: Callable[[Progress], RunResult], *, as_json: bool) -> int:
    """Shows a run while it trains and says what came of it; returns the exit code as `run_manifest`."""
    from orbit_runtime.observability.logs import configure_logs
    from orbit_runtime.observability.progress import build_progress

    shown = manifest.spec.observability
    configure_logs(shown.log_level, shown.log_format)
    progress = build_progress(manifest.name, as_json=as_json, log_format=shown.log_format)
    try:
        result = train(progress)
    finally:
        # An error's message must not be drawn over by a live display.
        progress.close()
    if as_json:
        print(json.dumps({"event": "result", "ended": result.ended, "uri": result.uri, **summary_of(result.report)}))
    else:
        print(format_result(result.ended, result.uri, result.report))
    return EXIT_STOPPED if result.ended == "stopped" else EXIT_DONE


def summary_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a report that a script asks for first."""
    names = (
        "steps", "headline", "reward_first", "reward_last", "publishes", "publishes_proven", "policy_version",
        "adapter_digest", "resumed",
    )  # fmt: skip
    return {name: report.get(name) for name in names}


def format_result(ended: str, uri: str, report: Mapping[str, Any]) -> str:
    """Reward before and after, what is proven, and where everything is."""
    name = (report.get("headline") or {"name": "reward"})["name"]
    first, last, change = before_and_after(report)
    state = {
        "stopped": "stopped on request; the same command continues",
        "exhausted": "done: the prompts are used up",
        "converged": "done early: the held-out loss no longer improved",
    }
    took = f"{report.get('steps')} steps in {report.get('seconds', 0):.1f} s"
    version = report.get("policy_version")
    words = [
        f"{report.get('run')}: {state.get(ended, ended)}, {took}",
        f"{name} before {first}, after {last}{change}",
        *(
            [f"publishes proven {report.get('publishes_proven')} of {report.get('publishes')}"]
            if report.get("publishes")
            else []
        ),
        *(f"warning: {warning}" for warning in report.get("warnings", ())),
        # Stopped before the first step, a run has trained no adapter.
        *([] if version is None else [_published(uri, report)]),
        f"report  {uri}/report.html",
    ]
    return "\n".join(words)


def _published(uri: str, report: Mapping[str, Any]) -> str:
    folder = report.get("published", "adapters")
    return f"{folder.removesuffix('s'):<7} {uri}/{folder}/policy-v{report.get('policy_version')}"


def _print_processes(manifest: OrbitRun, folder: Path, as_json: bool) -> None:
    from orbit_runtime.api.before import find_facts, find_ranks, find_server_gpus
    from orbit_runtime.cli.processes import describe

    try:
        model = find_facts(manifest, folder)
    except OrbitError:
        model = None
    processes = describe(manifest, find_server_gpus(manifest, model), find_ranks(manifest, model))
    if as_json:
        print_json({"run": manifest.name, "processes": processes})
        return
    print(f"{manifest.name} would start {len(processes)} kinds of process, and has started none:")
    for process in processes:
        print(f"\n{process['name']} x {process.get('count', 1)}: {process.get('role', '')}".rstrip(": "))
        print(f"  {shlex.join(map(str, process['argv']))}")
        for name, value in process.get("environment", {}).items():
            print(f"  {name}={value}")
