"""How long each stage of a start took."""

from __future__ import annotations

from collections.abc import Mapping

from orbit_runtime.loop.show import StartTimes


def test_stages_up_to_the_first_rollouts_are_told_once_and_one_that_goes_on_is_added() -> None:
    told: list[Mapping[str, float]] = []
    times = iter([10.0, 10.5, 18.5, 19.0, 49.0, 50.0, 53.0, 53.25, 53.75, 54.0])
    start = StartTimes(told.append, clock=lambda: next(times))
    for stage in ("importing torch", "loading the model, 1.2 GiB", "starting the engine", "preflight", "parity"):
        start.stage(stage)
    # The engine was not alone: a teacher's check goes back to a stage that had been left.
    for stage in ("preflight", "collect"):
        start.stage(stage)
    assert told == []
    for stage in ("train", "publish", "collect", "train"):
        start.stage(stage)
    assert told == [
        {
            "opening the run folder": 0.5, "importing torch": 8.0, "loading the model": 0.5,
            "starting the engine": 30.0, "preflight": 1.25, "parity": 3.0, "first rollouts": 0.5,
        }
    ]  # fmt: skip
