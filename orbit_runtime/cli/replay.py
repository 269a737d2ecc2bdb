"""`orbit replay`: trains a run's recorded rollouts again and checks whether the adapter is the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orbit_runtime.cli.output import AsJson, complete_runs, format_json, format_table
from orbit_runtime.errors import EXIT_DONE, GateError

if TYPE_CHECKING:
    from orbit_runtime.loop.replay import ReplayedStep

SHOWN = 19
"""Characters of a digest: its kind and twelve digits."""


def replay(
    run: Annotated[
        str, typer.Argument(metavar="DIR", help="A run folder: a path or URI.", autocompletion=complete_runs)
    ],
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="Train only this many steps.")] = None,
    as_json: AsJson = False,
) -> int:
    """Train again on a run's recorded rollouts. Needs no engine or rewards; every adapter must be the same.

    \f
    Returns 0, or 84 where a step's adapter differs.

    Raises:
        OrbitError: the folder, its rollouts or the base cannot be used.
    """
    from orbit_runtime.api.checks import check_can_train
    from orbit_runtime.cli.bars import steps_bar
    from orbit_runtime.storage import open_store

    store = open_store(run, writable=False)
    check_can_train()
    from orbit_runtime.loop.replay import replay as train_again

    with steps_bar("replaying") as show:
        found = train_again(store, steps=steps, show=show, search_path=[str(Path.cwd())])
    if as_json:
        done = [{"step": each.step, "recorded": each.recorded, "replayed": each.replayed} for each in found.steps]
        print(
            format_json(
                {"uri": store.uri, "equal": found.is_equal, "computed_elsewhere": list(found.elsewhere), "steps": done}
            )
        )
    elif found.is_equal:
        steps_done = "1 step" if len(found.steps) == 1 else f"{len(found.steps)} steps"
        print(f"{steps_done} trained again from their recorded rollouts: every adapter is the same, bit for bit")
        print(f"adapter after step {found.steps[-1].step}  {found.steps[-1].replayed}")
    else:
        _explain(found.steps[-1], found.elsewhere)
    return EXIT_DONE if found.is_equal else GateError.exit_code


def _explain(last: ReplayedStep, elsewhere: Sequence[str]) -> None:
    rows = [("recorded", last.recorded[:SHOWN]), ("replayed", last.replayed[:SHOWN])]
    print(format_table(("", f"adapter after step {last.step}"), rows))
    if not elsewhere:
        print(
            "FAILED: the recorded rollouts give another adapter, with the run's versions and number of threads on the"
        )
        print("run's kind of processor: what was trained on is not what was recorded.")
        return
    print("NOT COMPARABLE: the recorded rollouts give another adapter, but this is not where the run was computed, and")
    print("sums may be rounded otherwise here:")
    for line in elsewhere:
        print(f"  {line}")
    if threads := next((line for line in elsewhere if line.startswith("threads: ")), None):
        print(f"Set OMP_NUM_THREADS and MKL_NUM_THREADS to {threads.split()[1]} and replay again.")
