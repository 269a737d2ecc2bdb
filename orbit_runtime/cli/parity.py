"""`orbit parity`: prints how far trainer and engine are apart, and where they part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orbit_runtime.cli.output import AsJson, Manifest, Overrides, format_json, format_table
from orbit_runtime.errors import EXIT_DONE, GateError

if TYPE_CHECKING:
    from orbit_runtime.loop.parity import ParityComparison

ROWS = {
    "trainer_floor": "trainer against itself",
    "engine_floor": "engine against itself",
    "base": "trainer against engine, adapter off",
    "identity": "trainer against engine, adapter at identity",
    "random": "trainer against engine, random adapter",
    "policy": "trainer against engine, current policy",
}


def parity(
    file: Manifest,
    overrides: Overrides = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="Compare layer by layer even if the gates hold. Needs engine: SGLang.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Measure how far trainer and engine differ. Before training; if too far, names the first layer, and why.

    \f
    Returns 0, or 84 where a gate does not hold.

    Raises:
        OrbitError: what `orbit run` would stop with before its first step.
    """
    from orbit_runtime.api.checks import check_before_run, check_can_train
    from orbit_runtime.spec import load_manifest

    manifest, folder = load_manifest(file, overrides or []), file.resolve().parent
    check_can_train()
    from orbit_runtime.observability.logs import configure_logs
    from orbit_runtime.observability.progress import build_progress

    shown = manifest.spec.observability
    configure_logs(shown.log_level, shown.log_format)
    # On standard error also for --json: the result is one object.
    progress = build_progress(manifest.name, log_format=shown.log_format)
    try:
        progress.stage("checking the plan")
        check_before_run(manifest, folder, progress.note)
        progress.stage("importing the loop")
        from orbit_runtime.loop.parity import compare_sides

        found = compare_sides(manifest, progress=progress, manifest_folder=folder, layers=layers)
    finally:
        progress.close()
    print(format_json(found.to_json()) if as_json else format_comparison(found))
    parted = found.location is not None and not found.location.is_clear
    return GateError.exit_code if found.preflight.failures or parted else EXIT_DONE


def format_comparison(found: ParityComparison) -> str:
    """|Δ log-prob| per token of every pair, the limit, and the layer where one was found."""
    from orbit_runtime.parity.statistics import TAIL_TOKENS

    header = ("", "tokens", "mean", "p50", "p99", "max", "k3", "ratio outside 0.9-1.1", "top-1 agreement")
    rows = []
    for name, words in ROWS.items():
        of = getattr(found.preflight, name)
        numbers = (f"{value:.2e}" for value in (of.mean, of.p50, of.p99, of.max, of.k3))
        top1 = "" if of.top1 is None else f"{of.top1:.2%}"
        rows.append((words, str(of.tokens), *numbers, f"{of.outside:.2%}", top1))
    limits = found.preflight.limits
    lines = [
        f"{found.precision} base, engine {found.engine}: |difference of log-probs| per token, {found.seconds:.1f} s",
        "",
        format_table(header, rows),
        "",
        f"limits: mean {limits.mean:.2e}; from {TAIL_TOKENS} tokens on p99 {limits.p99:.2e}, k3 {limits.k3:.2e}, "
        f"outside {limits.outside:.2%}, top-1 agreement {limits.top1:.2%}",
        f"a random adapter moves the trainer by {found.preflight.random_effect:.2e}",
    ]
    lines += [f"FAILED: {failure}" for failure in found.preflight.failures] or ["all within the limits"]
    if found.location:
        lines.append(f"layers: {found.location.verdict()}")
    return "\n".join(lines)
