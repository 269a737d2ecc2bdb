"""`orbit run` and `orbit sft`: check the manifest, the installation and that it fits, train, report the result.

Belongs here: the order of those, and their words. Does not belong here: training (`loop`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orbit_runtime.cli.output import AsJson, DryRun, Manifest, Out, Overrides, format_json, outcomes
from orbit_runtime.errors import EXIT_DONE, EXIT_STOPPED, OrbitError

if TYPE_CHECKING:
    from orbit_runtime.loop.run import RunResult
    from orbit_runtime.observability.progress import Progress
    from orbit_runtime.planner.layout import Layout
    from orbit_runtime.spec import OrbitRun


AcceptCode = Annotated[
    bool, typer.Option("--accept-code", help="Continue with rewards, environments or objectives that have changed.")
]


def run(
    file: Manifest,
    out: Out = None,
    overrides: Overrides = None,
    accept_code: AcceptCode = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> int:
    """Train. Continues by itself if the run folder holds a checkpoint of the same run."""
    accepted = ["spec.checkpoint.acceptCode=true"] * accept_code
    return _run(file, out, [*(overrides or []), *accepted], dry_run=dry_run, as_json=as_json)


def sft(
    file: Manifest,
    out: Out = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> int:
    """Learn from demonstrations. Like `run` with algorithm.type: SFT in the manifest; an RL run can start from the
    adapter (adapter.initFrom)."""
    return _run(file, out, [*(overrides or []), "spec.algorithm.type=SFT"], dry_run=dry_run, as_json=as_json)


def _run(file: Path, out: str | None, overrides: Sequence[str], *, dry_run: bool, as_json: bool) -> int:
    """Returns the exit code: 0 when the run is done, 75 when it was stopped on request."""
    from orbit_runtime.api.checks import MEASURED_STEPS, keep_pace, tell_pace
    from orbit_runtime.api.machine import this_machine
    from orbit_runtime.api.running import start_run
    from orbit_runtime.spec import load_manifest

    manifest, folder = load_manifest(file, overrides), file.resolve().parent
    if dry_run:
        _print_processes(manifest, folder, as_json)
        return EXIT_DONE

    def train(progress: Progress) -> RunResult:
        progress.note(tell_pace(manifest, folder, this_machine(manifest.spec.placement)))
        result = start_run(manifest, folder, out, progress)
        steps, start = int(result.report["steps"]), sum(result.report["start_seconds"].values())
        if steps >= MEASURED_STEPS:
            keep_pace(manifest, folder, start, result.report["seconds"] / steps)
        return result

    return run_with(manifest, train, as_json=as_json)


def run_with(manifest: OrbitRun, train: Callable[[Progress], RunResult], *, as_json: bool) -> int:
    """Shows a run while it trains and prints its result; returns the exit code."""
    import json

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
        "reason", "steps", "headline", "reward_first", "reward_last", "publishes", "publishes_proven", "policy_version",
        "adapter_digest", "resumed",
    )  # fmt: skip
    return {name: report.get(name) for name in names}


def format_result(ended: str, uri: str, report: Mapping[str, Any]) -> str:
    """Evaluation and reward, what is proven, and where everything is."""
    state = {
        "stopped": "stopped on request; the same command continues",
        "exhausted": "done: the prompts are used up",
        "converged": f"done early: {report.get('reason')}",
    }
    took = f"{report.get('steps')} steps in {report.get('seconds', 0):.1f} s"
    version, best = report.get("policy_version"), report.get("best")
    words = [
        f"{report.get('run')}: {state.get(ended, ended)}, {took}",
        *(f"{name} {text}" for name, text in outcomes(report)),
        *(
            [f"publishes proven {report.get('publishes_proven')} of {report.get('publishes')}"]
            if report.get("publishes")
            else []
        ),
        *(f"warning: {warning}" for warning in report.get("warnings", ())),
        # Stopped before the first step, a run has trained no adapter.
        *([] if version is None else [_published(uri, report)]),
        *([f"best    {uri}/adapters/policy-v{best['step']}"] if best and best["step"] != version else []),
        f"report  {uri}/report.html",
    ]
    return "\n".join(words)


def _published(uri: str, report: Mapping[str, Any]) -> str:
    folder = report.get("published", "adapters")
    return f"{folder.removesuffix('s'):<7} {uri}/{folder}/policy-v{report.get('policy_version')}"


def _print_processes(manifest: OrbitRun, folder: Path, as_json: bool) -> None:
    from orbit_runtime.api.checks import find_facts, find_ranks, find_server_gpus

    try:
        model = find_facts(manifest, folder)
    except OrbitError:
        model = None
    processes = describe_processes(manifest, find_server_gpus(manifest, model), find_ranks(manifest, model))
    if as_json:
        print(format_json({"run": manifest.name, "processes": processes}))
        return
    import shlex

    print(f"{manifest.name} would start {len(processes)} kinds of process, and has started none:")
    for process in processes:
        print(f"\n{process['name']} x {process.get('count', 1)}: {process.get('role', '')}".rstrip(": "))
        print(f"  {shlex.join(map(str, process['argv']))}")
        for name, value in process.get("environment", {}).items():
            print(f"  {name}={value}")


def describe_processes(
    run: OrbitRun, server_gpus: int | None = None, ranks: Layout | None = None
) -> list[dict[str, Any]]:
    """The processes for `--dry-run`: one entry each, `name, count, argv, environment`, in the order they would start.

    With the torch trainer and engine everything but the rewards runs in the one process of `orbit run`.

    Args:
        server_gpus: GPUs of each SGLang server, or its processes on a CPU; None: unknown before the model is there.
        ranks: how a trainer in several processes divides the model; None: one process trains.
    """
    from orbit_runtime.workers.user_code.reward_pool import default_workers

    is_sft = run.spec.algorithm.type == "SFT"
    does = "loop" if ranks else "trainer, loop" if is_sft else "trainer, engine, loop"
    return [
        {
            "name": "run",
            "count": 1,
            "argv": [sys.executable, "-m", "orbit_runtime.cli.main", "run", "FILE"],
            "environment": {},
            "role": f"{does} and status server of run {run.name}",
        },
        *(_ranks(ranks) if ranks else []),
        # Demonstrations are neither sampled nor scored.
        *([] if is_sft else _of_rollouts(run, server_gpus, ranks, default_workers())),
    ]


def _of_rollouts(
    run: OrbitRun, server_gpus: int | None, ranks: Layout | None, reward_workers: int
) -> list[dict[str, Any]]:
    return [
        *([_sglang(run, server_gpus)] if ranks or run.spec.rollout.engine == "SGLang" else []),
        {
            "name": "reward-worker",
            "count": reward_workers,
            "argv": [sys.executable, "-m", "orbit_runtime.workers.user_code.reward_worker"],
            "environment": {},
            "role": "rewards: " + ", ".join(reward.name for reward in run.spec.environment.rewards),
        },
    ]


def _ranks(layout: Layout) -> list[dict[str, Any]]:
    """The ranks' processes, parents first: one that ends takes along those after it."""
    python, workers = sys.executable, "orbit_runtime.workers"
    return [
        {
            "name": "rank-guard",
            "count": 1,
            "argv": [python, "-m", f"{workers}.ranks.guard", "..."],
            "environment": {},
            "role": "ends everything below it when the run ends, however it ends",
        },
        {
            "name": "ray-driver",
            "count": 1,
            "argv": [python, "-m", f"{workers}.ranks.driver", "..."],
            "environment": {},
            "role": "a private Ray (GCS and node agent) on the loopback device, for this run alone",
        },
        {
            "name": "trainer-rank",
            "count": layout.num_gpus,
            "argv": ["ray::RankActor"],
            "environment": {
                "RANK": f"0..{layout.num_gpus - 1}", "WORLD_SIZE": str(layout.num_gpus), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "chosen by the system", "CUDA_VISIBLE_DEVICES": "one GPU each; not set on a CPU",
            },
            "role": f"the model in parts, over Megatron-Core: {layout.text()}",
        },
    ]  # fmt: skip


def _sglang(run: OrbitRun, server_gpus: int | None) -> dict[str, Any]:
    """An SGLang server and the arguments that decide its size; the others follow from the model's files."""
    size = "as many GPUs as replicas leave it" if server_gpus is None else f"a process for each of {server_gpus}"
    python = os.environ.get("ORBIT_SGLANG_PYTHON") or sys.executable
    return {
        "name": "sglang-server",
        "count": run.spec.rollout.replicas,
        "argv": [
            python, "-m", "orbit_runtime.sglang_plugin.launch",
            *([] if server_gpus in (None, 1) else ["--tp-size", str(server_gpus)]), "...",
        ],
        "environment": {"ORBIT_SGLANG": "1"},
        "role": "rollouts; " + ("one process" if server_gpus == 1 else size),
    }  # fmt: skip
