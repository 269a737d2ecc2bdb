"""Derives the one error that the run ends with from what is left of a group of ranks.

Pure. Belongs here: which of several failures is the cause, its class, and its wording. Does not belong here: gathering
the facts (`driver`).

A rank that dies breaks the collectives of the others, so their errors arrive first and say the least. A death therefore
takes precedence over an error, and any error over one of a collective.
"""

from __future__ import annotations

from orbit_runtime import errors
from orbit_runtime.errors import CollectiveError, InternalError, OrbitError, OutOfMemoryError, StalledError
from orbit_runtime.workers.ranks.evidence import RankEnd, RankEvidence
from orbit_runtime.workers.ranks.rank import RankFailure

SMALL_SHARED_MEMORY = 1 << 24
_MEMORY_MONITOR = "memory monitor"


class RankTrace(Exception):
    """The traceback of a rank, as the cause of the error that it became here."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def judge(evidence: RankEvidence) -> OrbitError:
    """The error to end with; `about` gives rank, device, stage, collective and last step."""
    if evidence.lost is not None:
        first = evidence.ranks[0] if evidence.ranks else None
        error: OrbitError = CollectiveError(
            f"{evidence.lost}{_while(evidence, first)}; all ranks were ended",
            fix="start again: the run continues from its newest checkpoint; if it happens again, look at the node",
        )
        return _about(error, evidence, None)
    lost = [each for each in evidence.ranks if each.ending == "lost"]
    if lost:
        return _about(_death(evidence, lost), evidence, lost[0])
    failed = [each for each in evidence.ranks if each.failure is not None]
    if failed:
        cause = min(failed, key=lambda each: each.failure.error == "CollectiveError" if each.failure else False)
        assert cause.failure is not None
        return _about(_failure(evidence, cause, cause.failure), evidence, cause)
    return _stall(evidence)


def _failure(evidence: RankEvidence, end: RankEnd, failure: RankFailure) -> OrbitError:
    kind = getattr(errors, failure.error, InternalError)
    error: OrbitError = kind(
        f"{_who(end)}{_while(evidence, end)}: {failure.message}", where=failure.where, fix=failure.fix
    )
    error.__cause__ = RankTrace(failure.trace)
    return error


def _death(evidence: RankEvidence, lost: list[RankEnd]) -> OrbitError:
    end = lost[0]
    others = f" (and {', '.join(f'rank {each.rank}' for each in lost[1:])})" if lost[1:] else ""
    who, when = f"{_who(end)}{others}", _while(evidence, end)
    log = end.seen.log if end.seen else ()
    fatal = next((line for line in reversed(log) if "Fatal Python error" in line), None)
    end_of_log = "the end of its log:\n" + "\n".join(log) if any(log) else "it has written nothing"
    if fatal and "Bus error" in fatal and end.seen and end.seen.shared_memory_free < SMALL_SHARED_MEMORY:
        return OutOfMemoryError(
            f"{who} died{when}: /dev/shm is full",
            where="/dev/shm",
            fix="give the container more shared memory (docker run --shm-size; in a pod an emptyDir of medium Memory)",
        )
    about_memory = next((line for line in reversed(log) if errors.says_no_memory(line)), None)
    if _MEMORY_MONITOR in end.said or (end.seen and end.seen.was_short_of_memory) or (fatal and about_memory):
        by = "Ray's memory monitor" if _MEMORY_MONITOR in end.said else "the kernel"
        how = f": {about_memory}" if fatal and about_memory else f": {by} ended it for its memory"
        return OutOfMemoryError(
            f"{who} died{when}{how}",
            where="spec.placement.resources.memory",
            fix=f"raise it, or lower training.microBatchTokens; {end_of_log}",
        )
    if end.seen is None:
        if end.node:
            return CollectiveError(
                f"{who} was lost with its node {end.node}{when}; all ranks were ended",
                fix="start again on the nodes that are left: the run continues from its newest checkpoint",
            )
        # On this machine: nothing was seen of its process, and Ray alone says what became of it.
        said = next((line.strip() for line in end.said.splitlines() if line.strip()), "nothing")
        return CollectiveError(
            f"{who} was lost{when}, and Ray says: {said}; all ranks were ended",
            fix="start again: the run continues from its newest checkpoint; a machine that swaps or is far too busy "
            "loses processes",
        )
    how = f"died ({fatal})" if fatal else "was killed, or ended by itself,"
    return CollectiveError(
        f"{who} {how}{when}; all ranks were ended",
        fix=f"start again: the run continues from its newest checkpoint; {end_of_log}",
    )


def _stall(evidence: RankEvidence) -> OrbitError:
    """The error if no rank failed and the call does not end."""
    pending = [each for each in evidence.ranks if each.ending == "pending"]
    stopped = [each for each in pending if each.rank in evidence.stopped or (each.seen and each.seen.state == "T")]
    waiting = [each for each in pending if each not in stopped and _collective(each)]
    computing = [each for each in pending if each not in stopped and not _collective(each)]
    done = [each for each in evidence.ranks if each.ending == "done"]
    long = f" within {evidence.patience:g} s" if evidence.patience is not None else ""
    wait = "".join(f"; rank {each.rank} waits in {_collective(each)}" for each in waiting)
    stacks = "the stacks of all ranks are beside their logs"
    if stopped:
        end = stopped[0]
        error: OrbitError = StalledError(
            f"{_who(end)} is stopped (SIGSTOP){_while(evidence, end)}{wait}",
            fix=f"find out who stops processes of this run; {stacks}",
        )
    elif waiting and (done or not computing):
        end = waiting[0]
        missing = ", ".join(f"rank {each.rank}" for each in done) or "no rank"
        error = CollectiveError(
            f"{_collective(end)} did not end{long}{_while(evidence, end)}: {missing} did not take part{wait or ''}",
            fix=f"{stacks}; if each rank is in another collective, they diverged: report it",
        )
    else:
        end = (computing or list(evidence.ranks))[0]
        error = StalledError(
            f"{_who(end)} did not get on{long}{_while(evidence, end)}{wait}",
            fix=f"{stacks}; if it is only slow, allow it more time",
        )
    return _about(error, evidence, end)


def _about(error: OrbitError, evidence: RankEvidence, end: RankEnd | None) -> OrbitError:
    note = end.seen.note if end and end.seen else None
    facts = {
        "rank": end.rank if end else None,
        "device": end.device if end else None,
        "stage": _stage(evidence, end),
        "collective": _collective(end) if end else None,
        "last_step": note.step if note else None,
    }
    error.about.update({name: value for name, value in facts.items() if value is not None})
    return error


def _who(end: RankEnd) -> str:
    return f"rank {end.rank} ({end.device})"


def _stage(evidence: RankEvidence, end: RankEnd | None) -> str:
    return (end.seen.note.stage if end and end.seen else None) or evidence.method


def _while(evidence: RankEvidence, end: RankEnd | None) -> str:
    note = end.seen.note if end and end.seen else None
    collective = _collective(end) if end and end.ending != "pending" else None
    words = [f"stage {_stage(evidence, end)}"]
    words += [f"step {note.step}"] if note and note.step is not None else []
    words += [f"collective {collective}"] if collective else []
    return f" in {', '.join(words)}"


def _collective(end: RankEnd) -> str | None:
    """The collective from its failure if it failed, else the one it is in."""
    if end.failure is not None and end.failure.collective:
        return end.failure.collective
    return end.seen.collective if end.seen else None
