"""The layers of a model that each pipeline stage holds."""

from __future__ import annotations

from orbit_runtime.errors import UnsupportedError


def stage_layers(num_layers: int, stage: int, stages: int) -> range:
    """Divides as evenly as possible; the first stages have one more, because the last also has the output layer.

    Example: `[len(stage_layers(61, stage, 4)) for stage in range(4)] == [16, 15, 15, 15]`.

    Raises:
        UnsupportedError: there are more stages than layers.
    """
    if stages > num_layers:
        raise UnsupportedError(
            f"{num_layers} layers cannot be divided into {stages} stages",
            where="spec.training.parallel.pipeline",
            fix=f"write at most {num_layers}",
        )
    size, more = divmod(num_layers, stages)
    first = stage * size + min(stage, more)
    return range(first, first + size + (stage < more))
