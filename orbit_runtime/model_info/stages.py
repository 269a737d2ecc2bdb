"""Which layers of a model a stage holds, where layers are divided.

Belongs here: that division, which planner and policy must agree on. Does not belong here: bytes (`planner`), modules
(`policy.shares`).
"""

from __future__ import annotations

from orbit_runtime.errors import UnsupportedError


def stage_layers(num_layers: int, stage: int, stages: int) -> range:
    """As even as it goes; the first stages have one more, as the last has the output layer besides.

    Example: `[len(stage_layers(61, stage, 4)) for stage in range(4)] == [16, 15, 15, 15]`.

    Raises:
        UnsupportedError: there are more stages than layers.
    """
    if stages > num_layers:
        raise UnsupportedError(
            f"{num_layers} layers cannot be dealt out to {stages} stages",
            where="spec.training.parallel.pipeline",
            fix=f"write at most {num_layers}",
        )
    size, more = divmod(num_layers, stages)
    first = stage * size + min(stage, more)
    return range(first, first + size + (stage < more))
