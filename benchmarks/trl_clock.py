"""A callback that records when each step of a TRL trainer ended.

Belongs here: that callback, for every benchmark against TRL. Does not belong here: measuring.
"""

from __future__ import annotations

import time
from typing import Any


def build_clock() -> Any:
    """A `TrainerCallback` whose `seconds()` returns the duration of each step since training began."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        ends: list[float]

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.ends = [time.perf_counter()]

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

        def seconds(self) -> list[float]:
            return [end - start for start, end in zip(self.ends, self.ends[1:], strict=False)]

    return Clock()
