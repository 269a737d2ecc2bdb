"""`orbit plan`: what a run takes on a machine and whether it fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orbit_runtime.cli.output import AsJson, Manifest, Overrides, format_json
from orbit_runtime.errors import EXIT_DONE, UnsupportedError

if TYPE_CHECKING:
    from orbit_runtime.planner import Machine
    from orbit_runtime.spec import OrbitRun


def plan(
    file: Manifest,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Plan for this GPU, such as B200, instead of placement.gpuProduct."),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Show what a run needs and whether it fits. Part by part; needs no GPU and no download.

    \f
    Returns 0, or 78 where the plan itself was asked for as JSON and says no.

    Raises:
        UnsupportedError: (78) it does not fit, or is not supported; with the number.
    """
    from orbit_runtime.api.checks import find_facts, tell_pace
    from orbit_runtime.planner import check_verdict, judge
    from orbit_runtime.spec import load_manifest

    run = load_manifest(file, overrides or [])
    folder, machine = file.resolve().parent, find_machine(run, gpu)
    verdict = judge(run, find_facts(run, folder), machine)
    if as_json:
        print(format_json(verdict.to_json()))
        return UnsupportedError.exit_code if verdict.accepted is False else EXIT_DONE
    if verdict.plan:
        from orbit_runtime.cli.plan_table import print_plan
        from orbit_runtime.spec.description import describe_algorithm

        print_plan(verdict.plan)
        print(describe_algorithm(run.spec.algorithm))
        print(tell_pace(run, folder, machine))
    check_verdict(verdict)
    return EXIT_DONE


def find_machine(run: OrbitRun, gpu: str | None) -> Machine:
    """The machine that `--gpu` or `placement.gpuProduct` names, with the manifest's number of GPUs; else this one."""
    from orbit_runtime.api.machine import this_machine
    from orbit_runtime.planner.job import requested_machine

    if gpu is None and (run.spec.placement.gpus == 0 or run.spec.placement.gpu_product is None):
        return this_machine(run.spec.placement)
    return requested_machine(run, gpu) or this_machine(run.spec.placement)
