"""`orbit trainer`, `inference`, `orchestrator` and `rl`: a run whose sides are processes of their own.

Belongs here: their signatures. Does not belong here: what they do (`services`, `cli.sides`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orbit_runtime.cli.arguments import AsJson, Manifest, Out, Overrides

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
) -> None:
    """Run the trainer process of a run. For `orbit orchestrator`, on this machine or another."""
    from orbit_runtime.cli.sides import SideOptions, run_side

    options = SideOptions("trainer", file, listen, overrides or [], token_file, end_with_input)
    raise typer.Exit(run_side(options, as_json=as_json))


def inference(
    file: Manifest,
    listen: Listen = "127.0.0.1:8102",
    overrides: Overrides = None,
    token_file: TokenFile = None,
    end_with_input: EndWithInput = False,
    as_json: AsJson = False,
) -> None:
    """Run the engine process of a run. For `orbit orchestrator`, on this machine or another."""
    from orbit_runtime.cli.sides import SideOptions, run_side

    options = SideOptions("inference", file, listen, overrides or [], token_file, end_with_input)
    raise typer.Exit(run_side(options, as_json=as_json))


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
) -> None:
    """Run the loop with separate trainer and engine processes. Needs no torch."""
    from orbit_runtime.cli.sides import run_orchestrator

    addresses = {"trainer": trainer, "inference": inference}
    raise typer.Exit(
        run_orchestrator(
            file, addresses, out=out, overrides=overrides or [], token_file=token_file, patience=patience,
            as_json=as_json,
        )
    )  # fmt: skip


def rl(file: Manifest, out: Out = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Train in three processes on this machine. Gives the result of `orbit run`; a process that dies is restarted."""
    from orbit_runtime.cli.sides import run_together

    raise typer.Exit(run_together(file, out=out, overrides=overrides or [], as_json=as_json))


def add_commands(app: typer.Typer) -> None:
    for command in (rl, trainer, inference, orchestrator):
        app.command()(command)
