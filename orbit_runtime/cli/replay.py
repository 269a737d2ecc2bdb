"""`orbit replay`: trains a run's recorded rollouts again and says whether the same adapter comes out.

Belongs here: what is printed. Does not belong here: training them (`loop.replay`).
"""

from __future__ import annotations

from orbit_runtime.cli.output import format_table, print_json
from orbit_runtime.errors import EXIT_DONE, GateError
from orbit_runtime.storage import open_store

SHOWN = 19
"""Characters of a digest: its kind and twelve digits."""


def run_replay(uri: str, *, steps: int | None, as_json: bool) -> int:
    """Returns 0, or 84 where a step's adapter differs.

    Raises:
        OrbitError: the folder, its rollouts or the base cannot be used.
    """
    from orbit_runtime.cli.bars import steps_bar
    from orbit_runtime.cli.run import check_can_train

    store = open_store(uri, writable=False)
    check_can_train()
    from orbit_runtime.loop.replay import replay

    with steps_bar("replaying") as show:
        done = replay(store, steps=steps, show=show)
    differs = not done[-1].is_equal
    if as_json:
        found = [{"step": each.step, "recorded": each.recorded, "replayed": each.replayed} for each in done]
        print_json({"uri": store.uri, "equal": not differs, "steps": found})
    elif differs:
        last = done[-1]
        rows = [("recorded", last.recorded[:SHOWN]), ("replayed", last.replayed[:SHOWN])]
        print(format_table(("", f"adapter after step {last.step}"), rows))
        print("FAILED: the recorded rollouts give another adapter. On another kind of processor or with another torch")
        print("that may be rounding; on the machine of the run, what was trained on is not what was recorded.")
    else:
        steps_done = "1 step" if len(done) == 1 else f"{len(done)} steps"
        print(f"{steps_done} trained again from their recorded rollouts: every adapter is the same, bit for bit")
        print(f"adapter after step {done[-1].step}  {done[-1].replayed}")
    return GateError.exit_code if differs else EXIT_DONE
