"""`orbit trainer`, `inference`, `orchestrator` and `rl`: a run whose sides are processes of their own.

Belongs here: addresses, tokens, the life of the processes. Does not belong here: what they say to each other
(`services`), training (`loop`).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from orbit_runtime.cli.output import AsJson, Manifest, Out, Overrides, format_json
from orbit_runtime.cli.run import run_with
from orbit_runtime.cli.serve import read_door, read_token
from orbit_runtime.errors import EXIT_DONE, EXIT_STOPPED, StoppedOnRequest, UsageError

if TYPE_CHECKING:
    from orbit_runtime.loop.run import RunResult
    from orbit_runtime.observability.progress import Progress
    from orbit_runtime.services.connection import Connection
    from orbit_runtime.spec import OrbitRun

CHILD_PATIENCE_SECONDS = 2400.0
"""Seconds to wait for a side: more than ranks may take to start (`workers.ranks.group`), whose error says more."""


TokenFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File with the token that the three processes share. [ORBIT_SERVICE_TOKEN]"),
]
Listen = Annotated[str, typer.Option(metavar="HOST:PORT", help="Address to listen on; port 0 takes any free port.")]
EndWithInput = Annotated[
    bool, typer.Option("--end-with-input", help="End when standard input is closed, with the process that started it.")
]


def trainer(
    file: Manifest,
    listen: Listen = "127.0.0.1:8101",
    overrides: Overrides = None,
    token_file: TokenFile = None,
    end_with_input: EndWithInput = False,
    as_json: AsJson = False,
) -> int:
    """Run the trainer process of a run. For `orbit orchestrator`, on this machine or another."""
    return _run_side(
        "trainer", file, listen, overrides or [], token_file, end_with_input=end_with_input, as_json=as_json
    )


def inference(
    file: Manifest,
    listen: Listen = "127.0.0.1:8102",
    overrides: Overrides = None,
    token_file: TokenFile = None,
    end_with_input: EndWithInput = False,
    as_json: AsJson = False,
) -> int:
    """Run the engine process of a run. For `orbit orchestrator`, on this machine or another."""
    return _run_side(
        "inference", file, listen, overrides or [], token_file, end_with_input=end_with_input, as_json=as_json
    )


def _run_side(
    kind: Literal["trainer", "inference"],
    file: Path,
    listen: str,
    overrides: Sequence[str],
    token_file: Path | None,
    *,
    end_with_input: bool,
    as_json: bool,
) -> int:
    """Answers until SIGINT or SIGTERM, and finishes the current call. Returns 0, or 75 if it was stopped before it
    listened.

    Raises:
        UsageError: (64) an option is impossible, or others could ask without a token. OutputError: (73) the port is
            taken. OrbitError: see `orbit run` with this manifest before its first step.
    """
    from orbit_runtime.api.checks import check_can_train
    from orbit_runtime.spec import load_manifest
    from orbit_runtime.workers.child.run_token import SERVICE_VARIABLE

    host, port, token = read_door(listen, token_file, SERVICE_VARIABLE)
    manifest = load_manifest(file, overrides)
    check_can_train()
    from orbit_runtime.observability.server import check_port

    check_port(host, port)
    from orbit_runtime.services.calls import build_inference_host, build_trainer_host
    from orbit_runtime.services.host import start_host
    from orbit_runtime.services.side_manifest import open_manifest
    from orbit_runtime.storage.cache import RetryPolicy
    from orbit_runtime.workers.child.signals import stop_on_signals

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def is_stopped() -> bool:
        return bool(stop)

    with stop_on_signals() as stop, ExitStack() as closing:
        if end_with_input:
            _end_with_input()
        patience = RetryPolicy(notice=note, stop=is_stopped)
        try:
            asked = open_manifest(manifest, file.resolve().parent, patience)
        except StoppedOnRequest:
            return EXIT_STOPPED
        if kind == "trainer":
            made = build_trainer_host(asked, note, closing)
        else:
            made = build_inference_host(asked, host, note, closing)
        if stop:
            return EXIT_STOPPED
        server = start_host(made, host, port, token)
        closing.callback(server.close)
        print(
            format_json({"kind": kind, "url": server.url})
            if as_json
            else f"the {kind} of {manifest.name} at {server.url}"
        )
        sys.stdout.flush()
        made.work(is_stopped)
    return EXIT_DONE


def _end_with_input() -> None:
    def wait() -> None:
        # Not by `sys.stdin.read`: Python aborts (SIGABRT) if it ends while a thread holds that lock.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        # Whoever started it is gone: nobody asks for what is computed now.
        os._exit(EXIT_STOPPED)

    threading.Thread(target=wait, name="orbit-input", daemon=True).start()


def orchestrator(
    file: Manifest,
    trainer: Annotated[str, typer.Option(metavar="URL", help="Address of `orbit trainer`.")] = "http://127.0.0.1:8101",
    inference: Annotated[
        str, typer.Option(metavar="URL", help="Address of `orbit inference`.")
    ] = "http://127.0.0.1:8102",
    out: Out = None,
    overrides: Overrides = None,
    token_file: TokenFile = None,
    patience: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long a process may be unreachable before the run ends.")
    ] = 600.0,
    as_json: AsJson = False,
) -> int:
    """Run the loop with separate trainer and engine processes. Needs no torch.

    \f
    Returns the exit code: 0 when the run is done, 75 when it was stopped on request.

    Raises:
        OrbitError: as `orbit run`, and where a process is not there (82) or not this run's.
    """
    from orbit_runtime.spec import load_manifest
    from orbit_runtime.workers.child.run_token import SERVICE_VARIABLE

    if not 0 < patience < float("inf"):
        raise UsageError(f"{patience} is not a valid time to wait", where="--patience", fix="write seconds")
    manifest = load_manifest(file, overrides or [])
    token = read_token(token_file, os.environ, SERVICE_VARIABLE)

    def train(progress: Progress) -> RunResult:
        from orbit_runtime.services.connection import Connection
        from orbit_runtime.services.side_manifest import kinds_of

        addresses = {"trainer": trainer, "inference": inference}
        lines = {kind: Connection(kind, addresses[kind], token, patience=patience) for kind in kinds_of(manifest.spec)}
        return _train(manifest, file, out, progress, lines)

    return run_with(manifest, train, as_json=as_json)


def rl(file: Manifest, out: Out = None, overrides: Overrides = None, as_json: AsJson = False) -> int:
    """Train in three processes on this machine. Gives the result of `orbit run`; a process that dies is restarted.

    \f
    Returns the exit code of the run; the children have ended by then. Raises: as `orchestrator`.
    """
    from orbit_runtime.api.checks import check_can_train
    from orbit_runtime.spec import load_manifest

    manifest = load_manifest(file, overrides or [])
    check_can_train()

    def train(progress: Progress) -> RunResult:
        from orbit_runtime.api.checks import check_before_run
        from orbit_runtime.planner.support.manifests import check_apart
        from orbit_runtime.services.children import Children
        from orbit_runtime.services.connection import Connection
        from orbit_runtime.services.side_manifest import kinds_of
        from orbit_runtime.workers.child.signals import interrupt_on_terminate

        check_apart(manifest.spec)
        progress.stage("checking the plan")
        check_before_run(manifest, file.resolve().parent, progress.note)
        kinds = kinds_of(manifest.spec)
        progress.stage(f"starting {' and '.join(kinds)}")
        # The loop has handlers of its own for as long as it runs; the children outlast it.
        with interrupt_on_terminate(), Children(kinds, file, overrides or [], progress.note) as children:
            lines = {
                kind: Connection(
                    kind, url, children.token, patience=CHILD_PATIENCE_SECONDS, check=children.check,
                )
                for kind, url in children.addresses.items()
            }  # fmt: skip
            return _train(manifest, file, out, progress, lines)

    return run_with(manifest, train, as_json=as_json)


def _train(
    manifest: OrbitRun, file: Path, out: str | None, progress: Progress, lines: Mapping[str, Connection]
) -> RunResult:
    from orbit_runtime.loop.run import run
    from orbit_runtime.services.orchestrate import RemoteSides

    for each in lines.values():
        each.note = progress.note
    sides = RemoteSides(lines["trainer"], lines.get("inference"))
    return run(manifest, out=out, progress=progress, manifest_folder=file.resolve().parent, sides=sides)
