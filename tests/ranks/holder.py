"""A process that holds a group of ranks, as a run does: `python holder.py LOGS`. Ends with 75 on SIGTERM.

Says `ready` once its ranks work, then lets them work until it is told to stop.
"""

from __future__ import annotations

import sys
from pathlib import Path

from orbit_runtime.errors import EXIT_STOPPED
from orbit_runtime.workers.child.signals import stop_on_signals
from orbit_runtime.workers.ranks.group import GroupSettings, start_ranks


def main(logs: Path) -> int:
    with stop_on_signals() as stop, start_ranks(GroupSettings("ranks.targets:Meeting", {}, 2), logs) as group:
        number = 0
        while not stop:
            number += 1
            group.call("step", number)
            if number == 1:
                print("ready", flush=True)
    return EXIT_STOPPED


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
