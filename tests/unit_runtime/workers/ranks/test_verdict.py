"""Which error a run ends with, from what is left of its ranks."""

from __future__ import annotations

import pytest

from orbit_runtime.errors import says_no_memory
from orbit_runtime.workers.ranks.evidence import Ending, RankEnd, RankEvidence, RankRemains
from orbit_runtime.workers.ranks.rank import RankFailure, RankNote
from orbit_runtime.workers.ranks.verdict import judge

NOTE = RankNote(stage="train", step=12)


def look(
    state: str | None = "S",
    collective: str | None = None,
    log: tuple[str, ...] = (),
    short: bool = False,
    shared: int = 1 << 30,
) -> RankRemains:
    return RankRemains(state, NOTE, collective, "", log, short, shared)


def end(
    rank: int, ending: Ending, seen: RankRemains | None = None, error: str | None = None, said: str = ""
) -> RankEnd:
    failure = RankFailure(error, "it failed", None, None, "Traceback", None) if error else None
    return RankEnd(rank, f"GPU {rank}", "10.0.0.1", ending, seen or look(), failure, said)


BROKEN = end(0, "failed", error="CollectiveError")


@pytest.mark.parametrize(
    ("ranks", "code", "rank", "words"),
    [
        ((BROKEN, end(1, "lost", look(None))), 81, 1, "rank 1 (GPU 1) was killed"),
        ((BROKEN, end(1, "failed", error="DivergedError")), 85, 1, "it failed"),
        ((BROKEN, end(1, "failed", error="GPUFaultError")), 80, 1, "it failed"),
        ((BROKEN, end(1, "failed", error="CollectiveError")), 81, 0, "it failed"),
        ((BROKEN, end(1, "lost", look(None, short=True))), 79, 1, "the kernel ended it for its memory"),
        ((end(0, "done"), end(1, "lost", said="killed by the memory monitor")), 79, 1, "Ray's memory monitor"),
        (
            (BROKEN, end(1, "lost", look(None, log=("Fatal Python error: Bus error",), shared=0))),
            79, 1, "/dev/shm is full",
        ),
        ((BROKEN, end(1, "lost", look(None, log=("Fatal Python error: Aborted",)))), 81, 1, "(Fatal Python error: Ab"),
        (
            (end(0, "pending", look(collective="all_reduce")), end(1, "pending", look("T"))),
            83, 1, "rank 1 (GPU 1) is stopped (SIGSTOP) in stage train, step 12; rank 0 waits in all_reduce",
        ),
        (
            (end(0, "pending", look(collective="all_reduce")), end(1, "pending", look("R"))),
            83, 1, "did not get on within 5 s",
        ),
        (
            (end(0, "pending", look(collective="all_reduce")), end(1, "done")),
            81, 0, "all_reduce did not end within 5 s in stage train, step 12: rank 1 did not take part",
        ),
        (
            (end(0, "pending", look(collective="all_reduce")), end(1, "pending", look(collective="barrier"))),
            81, 0, "rank 1 waits in barrier",
        ),
    ],
)  # fmt: skip
def test_the_cause_is_named_and_not_what_followed_from_it(
    ranks: tuple[RankEnd, ...], code: int, rank: int, words: str
) -> None:
    error = judge(RankEvidence("update", ranks, patience=5.0))
    assert (error.exit_code, error.about["rank"]) == (code, rank)
    assert words in str(error)
    assert (error.about["device"], error.about["stage"], error.about["last_step"]) == (f"GPU {rank}", "train", 12)
    assert error.to_json()["rank"] == rank


def test_a_rank_lost_with_its_node_names_the_node() -> None:
    error = judge(RankEvidence("update", (RankEnd(0, "GPU 0", "10.0.0.7", "lost", None),)))
    assert "rank 0 (GPU 0) was lost with its node 10.0.0.7 in stage update" in str(error)
    assert error.exit_code == 81


def test_a_rank_of_this_machine_of_which_nothing_was_seen_is_lost_in_rays_words() -> None:
    said = "\nThe actor died unexpectedly before finishing this task.\n  class_name: RankActor"
    error = judge(RankEvidence("start", (RankEnd(1, "CPU", "", "lost", None, said=said),)))
    assert "rank 1 (CPU) was lost in stage start, and Ray says: The actor died unexpectedly" in str(error)
    assert "node" not in str(error)
    assert error.exit_code == 81


def test_the_traceback_of_a_rank_is_the_cause_of_its_error() -> None:
    error = judge(RankEvidence("update", (end(0, "failed", error="InternalError"),)))
    assert "Traceback" in str(error.__cause__)
    assert not says_no_memory(str(error))
