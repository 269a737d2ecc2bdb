"""Runs a small quickstart, and notes what two of its steps enter: `python -m tests.architecture.traced_step FOLDER`.

`FOLDER/trace.json` then holds:

- `frames`: Orbit's frames on the stack when the policy loss is first entered, from the innermost one of `loop` down to
  the loss, both counted.
- `files`: the files of orbit_runtime with a function that was entered between the beginning of step 2 and that of step
  4, in any thread of the process. Two steps, because the checkpoint of a step is written beside the next one.

Belongs here: what runs in the traced process. Does not belong here: the limits (`ratchets`).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import CodeType
from typing import Any

PRODUCT = f"{Path(__file__).parents[2] / 'orbit_runtime'}{os.sep}"
BEGINS_A_STEP = ("loop/steps.py", "_begin_steps")
LOSS = ("algorithms/losses.py", "policy_loss")
FIRST, LAST = 2, 4
SMALL = ["training.steps=4", "training.promptsPerStep=8", "checkpoint.everySteps=1", "evaluation=null"]


class Trace:
    def __init__(self, result: Path) -> None:
        self._result = result
        self._steps = 0
        self._files: set[str] = set()
        self._frames: list[str] = []

    def entered(self, code: CodeType, _offset: int) -> Any:
        place = self._place(code)
        if place is None:
            return sys.monitoring.DISABLE
        if place == BEGINS_A_STEP:
            self._begin_step()
            return None
        if FIRST <= self._steps < LAST:
            self._files.add(place[0])
            if place == LOSS and not self._frames:
                self._frames = self._stack()
        return sys.monitoring.DISABLE

    def _begin_step(self) -> None:
        self._steps += 1
        if self._steps == FIRST:
            sys.monitoring.restart_events()
        elif self._steps == LAST:
            facts = {"frames": self._frames, "files": sorted(self._files)}
            self._result.write_text(json.dumps(facts, indent=1), encoding="utf-8")

    @staticmethod
    def _place(code: CodeType) -> tuple[str, str] | None:
        # A process that ends has lost its modules' names.
        product = PRODUCT or ""
        file = code.co_filename
        return (file[len(product) :], code.co_name) if product and file.startswith(product) else None

    def _stack(self) -> list[str]:
        """From the innermost frame of `loop` to the loss."""
        frames = []
        frame = sys._getframe(2)
        while frame is not None:
            place = self._place(frame.f_code)
            if place is not None:
                frames.append(f"{place[0]}:{frame.f_code.co_qualname}")
                if place[0].startswith("loop/"):
                    break
            frame = frame.f_back  # type: ignore[assignment]
        return frames[::-1]


def main() -> None:
    folder = Path(sys.argv[1])
    trace = Trace(folder / "trace.json")
    monitoring = sys.monitoring
    monitoring.use_tool_id(monitoring.PROFILER_ID, "traced_step")
    monitoring.register_callback(monitoring.PROFILER_ID, monitoring.events.PY_START, trace.entered)
    monitoring.set_events(monitoring.PROFILER_ID, monitoring.events.PY_START)

    from orbit_runtime.cli.main import main as orbit

    overrides = [word for each in SMALL for word in ("--set", f"spec.{each}")]
    sys.argv = ["orbit", "run", "examples/quickstart.yaml", "--out", str(folder / "run"), *overrides]
    try:
        orbit()
    finally:
        monitoring.set_events(monitoring.PROFILER_ID, 0)


if __name__ == "__main__":
    main()
