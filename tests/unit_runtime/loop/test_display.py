"""How long each stage of a start took, and what is said of episodes that stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from orbit_runtime.environments.episodes import EpisodeTimeout, FinishedEpisode
from orbit_runtime.errors import RewardsFailingError
from orbit_runtime.loop.buffer import EpisodeSnapshot, dump_snapshots, load_snapshots
from orbit_runtime.loop.collect import MAX_STOPPED, CollectedStep, gather_stopped
from orbit_runtime.loop.display import RunDisplay, StartTimes, show_timeouts
from orbit_runtime.loop.keep import keep_failure
from orbit_runtime.observability.metrics import RunMetrics
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.observability.status import LiveStatus
from orbit_runtime.storage import open_store
from orbit_runtime.types import Group, Prompt, Rollout, Turn


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


STOPPED = EpisodeTimeout("environment", "no answer within 1 s; its process was killed", "File game.py, line 3 in step")


def played(number: int, stopped: EpisodeTimeout | None = STOPPED) -> FinishedEpisode:
    turns = (Turn("user", 0, 1, "play"), Turn("assistant", 1, 2, f"move {number}"))
    rollout = Rollout(
        "r", 3, f"p/{number}", 1, turns, [5, 6], [0, 1], [0.0, -1.0], [-1, 0], None, "timeout", {"one": None}, "stop"
    )  # type: ignore[arg-type]
    return FinishedEpisode(rollout, (STOPPED.reason,), stopped)


def collected(*episodes: FinishedEpisode) -> CollectedStep:
    groups = tuple(Group(Prompt(each.rollout.prompt_id, 0, ()), (each.rollout,)) for each in episodes)
    return CollectedStep(groups, (), 0.0, 0.0, stopped=gather_stopped(episodes))


class Notes(SilentProgress):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, message: str, **facts: object) -> None:
        self.notes.append(message)


def told(found: CollectedStep) -> list[str]:
    progress = Notes()
    show_timeouts(RunDisplay(progress, LiveStatus("r"), RunMetrics(run="r")), 3, found)
    return progress.notes


def test_what_stopped_is_told_in_one_sentence_a_step() -> None:
    assert told(collected(played(0, None), played(1, None))) == []
    assert told(collected(played(0, None), played(1), played(2))) == [
        "step 3: episodes stopped and are masked: environment: no answer within 1 s; its process was killed (2 times); "
        "stacks and texts are in failures/step-000003.stopped.jsonl"
    ]


def test_the_first_of_a_step_are_kept_with_stage_stack_and_text(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    error = RewardsFailingError("too many")
    keep_failure(store, 3, error, collected(*map(played, range(MAX_STOPPED + 5))))
    lines = [json.loads(line) for line in store.get("failures/step-000003.stopped.jsonl").splitlines()]
    assert [line["prompt_id"] for line in lines] == [f"p/{number}" for number in range(MAX_STOPPED)]
    assert lines[0] == {
        "prompt_id": "p/0", "sample_index": 1, "stage": STOPPED.stage, "reason": STOPPED.reason,
        "stack": STOPPED.stack, "turns": [["user", "play"], ["assistant", "move 0"]],
    }  # fmt: skip
    other = open_store(str(tmp_path / "other"))
    keep_failure(other, 3, error, collected(played(0, None)))
    assert not [key for key in other.list("failures/") if "stopped" in key]


def test_a_checkpoint_keeps_the_evidence_of_a_later_step() -> None:
    kept = [EpisodeSnapshot(4, 0, ("p/0", 0, 1), played(0)), EpisodeSnapshot(4, 1, ("p/1", 0, 1), played(1, None))]
    assert [each.played and each.played.stopped for each in load_snapshots(dump_snapshots(kept), where="c")] == [
        STOPPED,
        None,
    ]
