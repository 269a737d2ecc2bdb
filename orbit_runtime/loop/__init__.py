"""The run itself: collect, train, publish with proof and keep, repeated until the last step.

Belongs here: the order of stages, composition, resuming, recording. Only this package saves anything.
Does not belong here: the arithmetic of any stage.
"""

from orbit_runtime.loop.run import RunResult, run

__all__ = ["RunResult", "run"]
