"""Whether a run may be tried again, when, and which nodes to avoid."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orbit_operator.facts import Attempt, Budget, Lifecycle, Verdict
from orbit_operator.policies.failure import FIRST_INFRA_THEN_USER

FIRST_DELAY = 10.0
LONGEST_DELAY = 600.0
JITTER = 0.2
FREE_WITHOUT_PROGRESS = 7
"""Consecutive stops on request without progress in between that are free; further ones are charged to the cluster.

Smaller than the number of listed attempts (`attempts.LISTED`, less the live one): a streak needs listed attempts.
"""
AVOIDED_NODES = 4
"""Number of nodes avoided, newest failures first; older ones may be tried again, or a small cluster would run out."""


@dataclass(frozen=True, slots=True)
class BudgetUse:
    """The part of each budget that the attempts so far have used."""

    user: int = 0
    infra: int = 0
    free: int = 0


@dataclass(frozen=True, slots=True)
class RestartDecision:
    """The consequence of the attempts so far: another one at `not_before` or later, or the end because of `refused`."""

    not_before: float
    avoid_nodes: tuple[str, ...] = ()
    refused: str = ""
    """`RetriesExhausted`, `InfraRestartsExhausted`, or empty."""


def charge(attempts: Sequence[Attempt], number: int, verdict: Verdict) -> Budget:
    """The budget to which an ending is charged, given earlier attempts. Pure in the attempts before `number`."""
    before = [attempt for attempt in attempts if attempt.number < number and attempt.verdict is not None]
    this = next((attempt for attempt in attempts if attempt.number == number), None)
    if verdict.budget == "infra" and verdict.reason in FIRST_INFRA_THEN_USER and before:
        last = before[-1]
        assert last.verdict is not None
        if last.verdict.reason == verdict.reason and not _progressed(last, this):
            return "user"
    if verdict.result == "Stopped":
        streak = 0
        for earlier, later in zip(reversed(before), [this, *reversed(before[1:])], strict=False):
            assert earlier.verdict is not None
            if earlier.verdict.result != "Stopped" or _progressed(earlier, later):
                break
            streak += 1
        if streak >= FREE_WITHOUT_PROGRESS:
            return "infra"
    return verdict.budget


def num_spent(attempts: Sequence[Attempt], retired: Mapping[str, float]) -> BudgetUse:
    """Sums over attempts that are over, including those no longer listed."""
    budgets = [
        attempt.verdict.budget for attempt in attempts if attempt.verdict and attempt.verdict.result != "Succeeded"
    ]
    return BudgetUse(
        user=budgets.count("user") + int(retired.get("user", 0)),
        infra=budgets.count("infra") + int(retired.get("infra", 0)),
        free=budgets.count("free") + int(retired.get("free", 0)),
    )


def decide_restart(attempts: Sequence[Attempt], spent: BudgetUse, lifecycle: Lifecycle, uid: str) -> RestartDecision:
    """Decides what follows when no attempt is live. `attempts` are all over, in order."""
    if not attempts:
        return RestartDecision(0.0)
    last = attempts[-1]
    assert last.verdict is not None
    if spent.user > lifecycle.max_user_retries:
        return RestartDecision(0.0, refused="RetriesExhausted")
    if spent.infra > lifecycle.max_infra_restarts:
        return RestartDecision(0.0, refused="InfraRestartsExhausted")
    avoid = [attempt.node for attempt in attempts if attempt.verdict and attempt.verdict.avoid_node and attempt.node]
    newest = tuple(dict.fromkeys(reversed(avoid)))[:AVOIDED_NODES]
    return RestartDecision((last.ended or 0.0) + back_off(attempts, uid), tuple(sorted(newest)))


def back_off(attempts: Sequence[Attempt], uid: str) -> float:
    """Seconds to wait, doubled with each consecutive failure without progress; the jitter depends on the run."""
    failures = 0
    for earlier, later in zip([None, *attempts], attempts, strict=False):
        assert later.verdict is not None
        if later.verdict.budget == "free":
            continue
        failures = 1 if earlier is not None and _progressed(earlier, later) else failures + 1
    last = attempts[-1].verdict
    if failures == 0 or (last is not None and last.budget == "free"):
        return 0.0
    delay = min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** (failures - 1))
    draw = int.from_bytes(hashlib.sha256(f"{uid}/{len(attempts)}/{attempts[-1].number}".encode()).digest()[:4]) / 2**32
    return float(delay * (1 - JITTER + 2 * JITTER * draw))


def _progressed(earlier: Attempt, later: Attempt | None) -> bool:
    """Whether the later attempt left a checkpoint beyond the earlier one's."""
    reached = None if later is None else later.checkpoint_step
    return reached is not None and reached > (earlier.checkpoint_step or 0)
